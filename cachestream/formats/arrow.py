"""Arrow files, as Hugging Face's `save_to_disk` writes them, read as a stream of record batches."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from cachestream.sources.api import (
    Batch,
    ColumnOptions,
    ConfigError,
    Defaults,
    File,
    FileList,
    Files,
    FilesSource,
    Format,
    ImageOptions,
    Item,
    Part,
    Size,
    Stream,
    StreamFile,
    Url,
    expanded_bytes,
    load_arrow,
    require,
    table_rows,
)

BATCH_BYTES: Final = 8 << 20
_SPLITS: Final = "dataset_dict.json"
_STATES: Final = ("state.json", "dataset_info.json", _SPLITS)  # of Hugging Face's folders
_ENDINGS: Final = (".arrow",)


class ArrowFormat(Format):
    """Tables of Arrow, in streams and files: see `ArrowSource` for the options."""

    name = "arrow"
    endings = _ENDINGS

    def __init__(self, options: ColumnOptions) -> None:
        require("pyarrow.ipc", "parquet", "Arrow files")
        self._options, self.images, self.identity = options, options.images, options.identity
        self._is_saved = False

    @classmethod
    def begins(cls, head: bytes) -> bool:
        return head.startswith((b"ARROW1", b"\xff\xff\xff\xff"))

    @classmethod
    def claims(cls, names: Sequence[str]) -> bool:
        ends = posixpath.basename(names[0]), posixpath.basename(names[-1])
        is_saved = any(name in _STATES for name in ends)
        return is_saved and all(name in _STATES or name.endswith(_ENDINGS) for name in ends)

    def find(self, urls: Any, storage_options: Mapping[str, Any] | None, owner: str) -> FileList:
        return FileList(urls, storage_options, owner=owner)  # with the states of a saved data set

    def folder_columns(self) -> tuple[Sequence[str] | None, Mapping[str, Any]]:
        return self._options.columns, self._options.defaults

    def check(self, files: Files, folders: Sequence[str]) -> None:
        self._options = replace(self._options, of_folders=tuple(folders))
        keys = [file.key for file in files]
        if _SPLITS in keys:
            splits = sorted({key.partition("/")[0] for key in keys if key.endswith(_ENDINGS)})
            raise ConfigError(
                f"{files.shown} holds the splits of a DatasetDict: give the folder of one of them: "
                f"{', '.join(splits)}"
            )
        self._is_saved = any(posixpath.basename(key) in _STATES for key in keys)
        if not any(map(self._has_rows, keys)):
            raise ConfigError(f"{files.shown}: no Arrow files beside {keys[0]}; is it complete?")

    def _has_rows(self, key: str) -> bool:
        """Return whether a file has rows: it is no metadata, and no cache file of `Dataset.map`."""
        is_cached = posixpath.basename(key).startswith("cache-")
        return not self._is_saved or (key.endswith(_ENDINGS) and not is_cached)

    def parts(self, file: File) -> Sequence[str]:
        return ("",) if self._has_rows(file.key) else ()

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the rows of a file, as `Rows` where all of a batch are usable and have the same shapes."""
        with file.stream() as stream, file.parsed():
            yield from table_rows(self._batches(stream, file.where), 0)

    def _batches(self, stream: Stream, where: str) -> Iterator[Batch]:
        """Yield the rows of a file in batches of at most about BATCH_BYTES."""
        head = stream.read(8)
        if bytes(head) != b"ARROW1\0\0":  # the magic of an IPC file: a stream follows it, and then an index
            stream.push_back(head)
        reader = require("pyarrow.ipc", "parquet", "Arrow files").open_stream(StreamFile(stream))
        columns, names = self._options.choose(reader.schema, where)
        arrow = load_arrow()
        for batch in reader:
            batch.validate(full=True)  # offsets that lead out of their buffer would be followed
            step = max(1, batch.num_rows * BATCH_BYTES // max(1, expanded_bytes(arrow, batch)))
            for start in range(0, batch.num_rows, step):
                part = batch.slice(start, step).select(list(names))
                yield (part.num_rows, *columns.fields(part))


class ArrowSource(FilesSource):
    """The rows of Arrow files (IPC streams and files); a unit is a file.

    urls: a folder that Hugging Face's `Dataset.save_to_disk` wrote, a URL, a `{000..127}` range, a wildcard,
    or a list of these. Of a `DatasetDict`, the folder of one of its splits.

    A sample is a dict of the columns, as in `ParquetSource`, those that folders name included. `columns`
    (names of whole columns), `fields`, `decode_images`, `decoders`, `resize`, `crop` and errors are those of
    `ParquetSource`, too. The key is "file#row". Needs pyarrow: `pip install 'cachestream[parquet]'`.
    """

    reads = ArrowFormat

    def __init__(
        self,
        urls: Url | Iterable[Url],
        *,
        columns: Sequence[str] | None = None,
        decode_images: bool | Sequence[str] = True,
        storage_options: Mapping[str, Any] | None = None,
        resize: Size | None = None,
        crop: Size | None = None,
        fields: Mapping[str, Any] | None = None,
        decoders: Mapping[str, str] | None = None,
    ) -> None:
        images, defaults = ImageOptions(resize, crop), Defaults(fields).values
        options = ColumnOptions(columns, decode_images, images, defaults=defaults, decoders=decoders)
        super().__init__(ArrowFormat(options), urls, storage_options, fields)
