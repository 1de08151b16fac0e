"""Arrow files, as Hugging Face's `save_to_disk` writes them, read as a stream of record batches."""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from cachestream.config import require
from cachestream.errors import CacheStreamError, ConfigError, SampleError
from cachestream.listing.file_list import FileList, Url
from cachestream.listing.names import Names
from cachestream.listing.patterns import ARROW_ENDINGS
from cachestream.sources.base import Problems, Rows, in_own_context, one_by_one
from cachestream.sources.decode.arrow import Batch, expanded_bytes, load_arrow
from cachestream.sources.decode.images import ImageOptions, Size
from cachestream.sources.decode.table_columns import ColumnOptions, table_rows
from cachestream.sources.fields import Defaults
from cachestream.sources.hive import FolderColumns
from cachestream.sources.sample_files import FileUnits, SampleFiles
from cachestream.transport.remote_errors import classify
from cachestream.transport.stream import Stream, StreamFile

BATCH_BYTES: Final = 8 << 20
_SPLITS: Final = "dataset_dict.json"
_STATES: Final = ("state.json", "dataset_info.json", _SPLITS)


class ArrowSource(SampleFiles):
    """The rows of Arrow files (IPC streams and files); a unit is a file.

    urls: a folder that Hugging Face's `Dataset.save_to_disk` wrote, a URL, a `{000..127}` range, a wildcard,
    or a list of these. Of a `DatasetDict`, the folder of one of its splits.

    A sample is a dict of the columns, as in `ParquetSource`, those that folders name included. `columns` (names of whole columns), `fields`,
    `decode_images`, `resize`, `crop` and errors are those of `ParquetSource`, too. The key is "file#row".
    Needs pyarrow: `pip install 'cachestream[parquet]'`.
    """

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
    ) -> None:
        defaults, images = Defaults(fields), ImageOptions(resize, crop)
        self._options = ColumnOptions(columns, decode_images, images, defaults=defaults.values)
        require("pyarrow.ipc", "parquet", "Arrow files")
        files = FileList(urls, storage_options, owner="ArrowSource")
        self._folders = FolderColumns(files, columns, defaults.values)
        self._options = replace(self._options, of_folders=self._folders.names)
        identity = [*self._options.identity, *self._folders.identity]
        super().__init__("arrow", files, identity, defaults, images)
        has_rows = self._has_rows()
        self._set_units(FileUnits(has_rows), Names(itertools.compress(files.names, has_rows)))

    def _has_rows(self) -> list[bool]:
        """Return for each file whether it has rows: no metadata, and no cache file of `Dataset.map`."""
        keys = [self._files.key(index) for index in range(len(self._files))]
        if _SPLITS in keys:
            splits = sorted({key.partition("/")[0] for key in keys if key.endswith(ARROW_ENDINGS)})
            raise ConfigError(
                f"{self._files.shown} holds the splits of a DatasetDict: give the folder of one of them: "
                f"{', '.join(splits)}"
            )
        if not any(posixpath.basename(key) in _STATES for key in keys):
            return [True] * len(keys)
        has_rows = [
            key.endswith(ARROW_ENDINGS) and not posixpath.basename(key).startswith("cache-") for key in keys
        ]
        if not any(has_rows):
            raise ConfigError(f"{self._files.shown}: no Arrow files beside {keys[0]}; is it complete?")
        return has_rows

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the rows of a file in order. Raises as `Source.read`."""
        return one_by_one(self.read_rows(unit, rng))

    @in_own_context
    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, dict[str, Any]]]:
        """Yield the same rows, as `Rows` where all rows of a batch are usable and have the same shapes."""
        index, _ = self._locate(unit)
        where = self._files.where(index)
        problems = Problems(where)
        with self._open(index) as stream:
            batches = self._folders.added_to(self._batches(stream, where), index)
            rows = table_rows(batches, self._files.key(index), 0, problems)
            yield from self._defaults.fill_all(rows)
        problems.raise_any()

    def _batches(self, stream: Stream, where: str) -> Iterator[Batch]:
        """Yield the rows of a file in batches of at most about BATCH_BYTES."""
        head = stream.read(8)
        if bytes(head) != b"ARROW1\0\0":  # the magic of an IPC file: a stream follows it, and then an index
            stream.push_back(head)
        try:
            reader = require("pyarrow.ipc", "parquet", "Arrow files").open_stream(StreamFile(stream))
            columns, names = self._options.choose(reader.schema, where)
            arrow = load_arrow()
            for batch in reader:
                batch.validate(full=True)  # offsets that lead out of their buffer would be followed
                step = max(1, batch.num_rows * BATCH_BYTES // max(1, expanded_bytes(arrow, batch)))
                for start in range(0, batch.num_rows, step):
                    part = batch.slice(start, step).select(list(names))
                    yield (part.num_rows, *columns.fields(part))
        except ConfigError as error:
            raise SampleError(str(error)) from error
        except Exception as error:
            if isinstance(error, CacheStreamError) or classify(error) != "other":
                raise
            raise SampleError(f"{where}: malformed: {type(error).__name__}: {error}"[:500]) from error
