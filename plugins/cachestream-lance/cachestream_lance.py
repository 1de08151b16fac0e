"""A source for cachestream: the rows of Lance datasets, read with pylance."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from cachestream.config import check_mapping, whole_number
from cachestream.errors import CacheStreamError, ConfigError, SourceUnavailableError
from cachestream.listing.names import Names
from cachestream.listing.patterns import absolute
from cachestream.sources.base import Problems, Rows, check_unit, one_by_one
from cachestream.sources.decode.arrow import Batch, Columns
from cachestream.sources.decode.images import ImageOptions, Size
from cachestream.sources.decode.table_columns import ColumnOptions, table_rows
from cachestream.sources.fields import Defaults
from cachestream.transport import metering
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact, redact_text

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


class LanceSource:
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
        if not isinstance(url, str | os.PathLike):
            raise ConfigError(f"LanceSource takes the path or URL of one dataset, not a {type(url).__name__}")
        most = whole_number(unit_rows)
        if most is None or most < 1:
            raise ConfigError(f"unit_rows={unit_rows!r}: give a whole number, 1 or more")
        self._defaults, images = Defaults(fields), ImageOptions(resize, crop)
        self._options = ColumnOptions(columns, decode_images, images, nulls, self._defaults.values)
        self._url = absolute(os.fspath(url)).rstrip("/")
        self._shown = redact(self._url)
        self._storage = _lance_options(storage_options)
        self._secrets = Remote(self._url, storage_options).secrets
        self._version = version
        self._reset()
        dataset = self._open()
        self._version = dataset.version
        converter, self._names = self._options.choose(dataset.schema, self._shown)
        self._columns: Columns | None = converter
        counts = [(one.fragment_id, one.count_rows(), one.num_deletions) for one in dataset.get_fragments()]
        self._units = [
            (fragment, first, min(most, rows - first))
            for fragment, rows, _ in counts
            for first in range(0, rows, most)
        ]
        if not self._units:
            raise ConfigError(f"{self._shown}: the dataset has no rows")
        self.num_units, self.num_rows = len(self._units), sum(rows for _, rows, _ in counts)
        # Fragments are never changed: rows that are deleted are marked beside them, and so named here.
        deleted = {fragment: f"-{deletions}" if deletions else "" for fragment, _, deletions in counts}
        self.first_names = Names(f"{one}{deleted[one]}#{first}+{rows}" for one, first, rows in self._units)
        self.listing_digest = self.first_names.digest
        options = (*self._options.identity, *images.identity, *self._defaults.identity)
        self.fingerprint = "lance:" + "|".join((self._shown, *options))

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._opened: Any = None
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_lock", "_opened", "_pid", "_columns")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
        self._columns = None  # made from the schema when the dataset is opened

    def _open(self) -> Any:
        """Return the dataset, opened once in a process: Lance's threads do not survive a fork."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if self._opened is None:
                with self._errors_mapped():
                    self._opened = _lance().dataset(
                        self._url, version=self._version, storage_options=self._storage or None
                    )
            return self._opened

    @contextmanager
    def _errors_mapped(self, one_of_many: bool = False) -> Iterator[None]:
        with map_errors(self._shown, one_of_many=one_of_many, secrets=self._secrets):
            try:
                yield
            except CacheStreamError:
                raise
            except Exception as error:
                self._opened = None
                text = redact_text(str(error), self._secrets)
                if any(word in text.lower() for word in _TRANSIENT):
                    raise SourceUnavailableError(f"{self._shown}: {text[:500]}") from None
                raise

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the rows of a unit in order. Raises as `Source.read`."""
        return one_by_one(self.read_rows(unit, rng))

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        """Yield the same rows, as `Rows` where all rows of a batch are usable and have the same shapes."""
        check_unit(self, unit, self.num_units)
        fragment, first, count = self._units[unit]
        problems = Problems(f"{self._shown}: fragment {fragment}")
        rows = table_rows(self._batches(fragment, first, count), str(fragment), first, problems)
        yield from self._defaults.fill_all(rows)
        problems.raise_any()

    def _batches(self, fragment: int, first: int, count: int) -> Iterator[Batch]:
        """Yield the rows of a fragment from `first` on in batches of at most about _BATCH_BYTES."""
        dataset = self._open()
        columns = self._columns
        if columns is None:
            columns = self._columns = self._options.choose(dataset.schema, self._shown)[0]
        with self._errors_mapped(one_of_many=True):
            found = dataset.get_fragment(fragment).to_batches(
                columns=list(self._names), offset=first, limit=count, batch_readahead=1
            )
            for batch in found:
                metering.fetched(batch.nbytes)
                step = max(1, batch.num_rows * _BATCH_BYTES // max(1, batch.nbytes))
                for start in range(0, batch.num_rows, step):
                    part = batch.slice(start, step)
                    yield (part.num_rows, *columns.fields(part))

    def __repr__(self) -> str:
        return f"<LanceSource {self._shown}, version {self._version}, {self.num_rows:,} rows>"


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
