"""Arrow files, as Hugging Face's `save_to_disk` writes them, read as a stream of record batches."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from cachestream.config import require
from cachestream.errors import CacheStreamError, ConfigError, SampleError
from cachestream.listing.file_list import FileList, Url
from cachestream.listing.names import Names
from cachestream.listing.patterns import ARROW_ENDINGS
from cachestream.sources.base import Problems, Rows, check_unit, one_by_one
from cachestream.sources.decode.arrow import Batch, Columns, doubled_fields, items_of
from cachestream.sources.decode.images import ImageOptions, Size
from cachestream.sources.fields import Defaults, check_columns
from cachestream.transport.object import open_stream
from cachestream.transport.remote_errors import classify
from cachestream.transport.stream import Stream, StreamFile

BATCH_BYTES: Final = 8 << 20
_SPLITS: Final = "dataset_dict.json"
_STATES: Final = ("state.json", "dataset_info.json", _SPLITS)


class ArrowSource:
    """The rows of Arrow files (IPC streams and files); a unit is a file.

    urls: a folder that Hugging Face's `Dataset.save_to_disk` wrote, a URL, a `{000..127}` range, a wildcard,
    or a list of these. Of a `DatasetDict`, the folder of one of its splits.

    A sample is a dict of the columns, as in `ParquetSource`. `columns` (names of whole columns), `fields`,
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
        self._defaults, self._image_options = Defaults(fields), ImageOptions(resize, crop)
        check_columns(columns)
        if isinstance(decode_images, str):
            raise ConfigError(f"decode_images={decode_images!r}: give a list of columns, True or False")
        require("pyarrow.ipc", "parquet", "Arrow files")
        self._chosen = None if columns is None else tuple(columns)
        self._decode_images = decode_images
        self._files = FileList(urls, storage_options, owner="ArrowSource")
        self._units = self._data_files()
        self.first_names = Names(self._files.names[index] for index in self._units)
        self.listing_digest = self.first_names.digest
        shown = [] if columns is None else [f"columns={self._chosen}"]
        shown += [] if decode_images is True else [f"decode_images={decode_images}"]
        shown += [*self._image_options.identity, *self._defaults.identity]
        self.fingerprint = "arrow:" + "|".join((*self._files.identity, *shown))

    def _data_files(self) -> list[int]:
        """Return the indices of the files with rows: no metadata, and no cache files of `Dataset.map`."""
        keys = [self._files.key(index) for index in range(len(self._files))]
        if _SPLITS in keys:
            splits = sorted({key.partition("/")[0] for key in keys if key.endswith(ARROW_ENDINGS)})
            raise ConfigError(
                f"{self._files.shown} holds the splits of a DatasetDict: give the folder of one of them: "
                f"{', '.join(splits)}"
            )
        if not any(posixpath.basename(key) in _STATES for key in keys):
            return list(range(len(keys)))
        units = [
            index
            for index, key in enumerate(keys)
            if key.endswith(ARROW_ENDINGS) and not posixpath.basename(key).startswith("cache-")
        ]
        if not units:
            raise ConfigError(f"{self._files.shown}: no Arrow files beside {keys[0]}; is it complete?")
        return units

    @property
    def num_units(self) -> int:
        return len(self._units)

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the rows of a file in order. Raises as `Source.read`."""
        return one_by_one(self.read_rows(unit, rng))

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, dict[str, Any]]]:
        """Yield the same rows, as `Rows` where all rows of a batch are usable and have the same shapes."""
        check_unit(self, unit, self.num_units)
        index = self._units[unit]
        where, key, row = self._files.where(index), self._files.key(index), 0
        problems = Problems(where)
        with open_stream(self._files.remote, self._files.path(index), where) as stream:
            for num_rows, fields, bad in self._batches(stream, where):
                keys = [f"{key}#{number}" for number in range(row, row + num_rows)]
                yield from self._defaults.fill_all(items_of(keys, row, fields, bad, problems))
                row += num_rows
        problems.raise_any()

    def _batches(self, stream: Stream, where: str) -> Iterator[Batch]:
        """Yield the rows of a file in batches of at most about BATCH_BYTES."""
        arrow = require("pyarrow", "parquet", "Arrow files")
        require("pyarrow.compute", "parquet", "Arrow files")
        head = stream.read(8)
        if bytes(head) != b"ARROW1\0\0":  # the magic of an IPC file: a stream follows it, and then an index
            stream.push_back(head)
        try:
            reader = require("pyarrow.ipc", "parquet", "Arrow files").open_stream(StreamFile(stream))
            columns, names = self._columns_of(arrow, reader.schema, where)
            for batch in reader:
                batch.validate(full=True)  # offsets that lead out of their buffer would be followed
                step = max(1, batch.num_rows * BATCH_BYTES // max(1, batch.nbytes))
                for start in range(0, batch.num_rows, step):
                    part = batch.slice(start, step).select(names)
                    yield (part.num_rows, *columns.fields(part))
        except ConfigError as error:
            raise SampleError(str(error)) from error
        except Exception as error:
            if isinstance(error, CacheStreamError) or classify(error) != "other":
                raise
            raise SampleError(f"{where}: malformed: {type(error).__name__}: {error}"[:500]) from error

    def _columns_of(self, arrow: Any, schema: Any, where: str) -> tuple[Columns, list[str]]:
        """Return the converter for the chosen columns of `schema`, and the columns' names."""
        names = list(schema.names if self._chosen is None else self._chosen)
        missing = [name for name in names if name not in schema.names]
        for name in missing:
            if name not in self._defaults.values:
                raise ConfigError(f"{where}: no column '{name}'; there are {', '.join(schema.names)}")
        names = [name for name in names if name not in missing]
        part = arrow.schema([schema.field(name) for name in names], metadata=schema.metadata)
        for field in doubled_fields(arrow, part):
            raise ConfigError(
                f"{where}: several columns become the field '{field}': choose others with columns=[…]"
            )
        images = () if isinstance(self._decode_images, bool) else tuple(self._decode_images)
        columns = Columns(
            arrow,
            part,
            nulls=self._defaults.values,
            decode_images=bool(self._decode_images),
            images=images,
            image_options=self._image_options,
        )
        return columns, names

    def __repr__(self) -> str:
        return f"<ArrowSource {self._files.shown}, {self.num_units:,} files>"
