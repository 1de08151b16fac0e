"""A source for cachestream: the rows of Lance datasets, read with pylance."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from cachestream.sources.api import (
    Batch,
    CacheStreamError,
    ColumnOptions,
    Columns,
    ConfigError,
    Defaults,
    File,
    FileList,
    FilesSource,
    Format,
    ImageOptions,
    Item,
    Part,
    Size,
    SourceUnavailableError,
    absolute,
    check_count,
    check_mapping,
    fetched,
    redact_text,
    table_rows,
)

_BATCH_BYTES: Final = 8 << 20
# The names of s3fs's options → those of Lance's own client (object_store).
_S3_OPTIONS: Final = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint",
    "region_name": "aws_region",
    "anon": "aws_skip_signature",
}
# The remote does not answer, in the words of Lance's client: it raises OSError for everything.
_TRANSIENT: Final = ("error sending request", "timed out", "connection", "503", "500 internal", "slowdown")
_DEADLINES: Final = {"connect_timeout": "5s", "timeout": "30s", "client_max_retries": "2"}


def _lance() -> Any:
    try:
        return importlib.import_module("lance")
    except ImportError as error:
        raise ConfigError(f"LanceSource needs pylance: pip install pylance ({error})") from error


class LanceFormat(Format):
    """A Lance dataset, which is one file: see `LanceSource`. A part is "FRAGMENT#FIRST+ROWS"."""

    name = "lance"
    nouns = ("dataset", "unit")

    def __init__(self, options: ColumnOptions, version: int | str | None, unit_rows: int) -> None:
        self._options, self.images = options, options.images
        self._version, self._most = version, check_count("unit_rows", unit_rows)
        self.identity = options.identity
        self._reset()

    def _reset(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._opened: Any = None
        self._chosen: tuple[Columns, tuple[str, ...]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_lock", "_pid", "_opened", "_chosen")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def find(self, urls: Any, storage_options: Mapping[str, Any] | None, owner: str) -> FileList:
        if not isinstance(urls, str | os.PathLike):
            raise ConfigError(f"{owner} takes the path or URL of one dataset, not a {type(urls).__name__}")
        self._url, self._storage = absolute(os.fspath(urls)).rstrip("/"), _lance_options(storage_options)
        return FileList.of_one(self._url, storage_options)

    def parts(self, file: File) -> Sequence[str]:
        dataset = self._open(file)
        self._version = dataset.version
        fragments = [
            (one.fragment_id, one.count_rows(), one.num_deletions) for one in dataset.get_fragments()
        ]
        # Fragments are never changed: rows that are deleted are marked beside them, and so named here.
        return [
            f"{fragment}{f'-{deleted}' if deleted else ''}#{first}+{min(self._most, rows - first)}"
            for fragment, rows, deleted in fragments
            for first in range(0, rows, self._most)
        ]

    def prefix(self, file: File, part: Part) -> str:
        return f"{_place(part)[0]}#"

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the rows of a part, as `Rows` where all of a batch are usable and have the same shapes."""
        return table_rows(self._batches(file, part), _place(part)[1])

    def _batches(self, file: File, part: Part) -> Iterator[Batch]:
        """Yield the rows of a part in batches of at most about _BATCH_BYTES."""
        fragment, first, count = _place(part)
        dataset = self._open(file)
        chosen = self._chosen
        assert chosen is not None
        with self._errors_mapped(file):
            found = dataset.get_fragment(fragment).to_batches(
                columns=list(chosen[1]), offset=first, limit=count, batch_readahead=1
            )
            for batch in found:
                fetched(batch.nbytes)
                step = max(1, batch.num_rows * _BATCH_BYTES // max(1, batch.nbytes))
                for start in range(0, batch.num_rows, step):
                    piece = batch.slice(start, step)
                    yield (piece.num_rows, *chosen[0].fields(piece))

    def _open(self, file: File) -> Any:
        """Return the dataset, opened once in a process: Lance's threads do not survive a fork."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if self._opened is None:
                with self._errors_mapped(file):
                    opened = _lance().dataset(
                        self._url, version=self._version, storage_options=self._storage or None
                    )
                    self._chosen = self._options.choose(opened.schema, file.where)
                self._opened = opened
            return self._opened

    @contextmanager
    def _errors_mapped(self, file: File) -> Iterator[None]:
        with file.errors_mapped():
            try:
                yield
            except CacheStreamError:
                raise
            except Exception as error:
                self._opened = None
                text = redact_text(str(error))
                if any(word in text.lower() for word in _TRANSIENT):
                    raise SourceUnavailableError(f"{file.where}: {text[:500]}") from None
                raise


class LanceSource(FilesSource):
    """The rows of a Lance dataset; a unit is a range of rows in one of its fragments.

    url: the folder of a dataset, "data.lance", local or on a store that Lance reads (s3://, gs://, az://).

    A sample is a dict of the columns, as in `cachestream.ParquetSource`: numbers, str, bytes, fixed-size lists
    of n numbers as arrays `[n]`. `columns` (only they are fetched), `nulls`, `fields`, `decode_images`,
    `resize` and `crop` are as there. The key of a sample is "fragment#row", with its number in the fragment.

    version: the version or the tag of the dataset; None: the latest one when the source is made.
    unit_rows: the most rows of a unit.
    storage_options: those of Lance, or key, secret, token, endpoint_url and client_kwargs as s3fs names them.

    The bytes that Lance fetches are counted by the size of its rows; its requests are its own. Raises
    ConfigError for options and columns that are none, SourceError for what is no dataset, and
    SourceUnavailableError for a remote that does not answer.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        version: int | str | None = None,
        unit_rows: int = 4096,
        nulls: Mapping[str, Any] | None = None,
        fields: Mapping[str, Any] | None = None,
        decode_images: bool | Sequence[str] = True,
        resize: Size | None = None,
        crop: Size | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        images = ImageOptions(resize, crop)
        options = ColumnOptions(columns, decode_images, images, nulls, Defaults(fields).values)
        super().__init__(LanceFormat(options, version, unit_rows), url, storage_options, fields)

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return sum(int(name.rpartition("+")[2]) for name in self.first_names)

    def _size(self) -> str:
        return f", {self.num_rows:,} rows"


def _place(part: Part) -> tuple[int, int, int]:
    """Return the fragment of a part, its first row in it, and the number of rows."""
    fragment, _, rows = part.name.partition("#")
    first, _, count = rows.partition("+")
    return int(fragment.partition("-")[0]), int(first), int(count)


def _lance_options(options: Mapping[str, Any] | None) -> dict[str, str]:
    """Return `options` under the names of Lance's client, with deadlines; {} for none."""
    check_mapping("storage_options", options, "{'key': '…'}")
    given = {name: value for name, value in (options or {}).items() if name != "max_object_size"}
    given.update(given.pop("client_kwargs", None) or {})
    found = {_S3_OPTIONS.get(name, name): _text(name, value) for name, value in given.items()}
    if found.get("aws_endpoint", "").startswith("http://"):
        found.setdefault("allow_http", "true")
    return {**_DEADLINES, **found}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise ConfigError(
            f"storage_options: {name} is a {type(value).__name__}; Lance's client takes texts and numbers"
        )
    return str(value).lower() if isinstance(value, bool) else str(value)
