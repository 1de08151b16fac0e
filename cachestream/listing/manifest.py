"""Manifests: text, CSV or Parquet files that list the URLs of the data, and their labels."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import re
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash
from fsspec.utils import get_protocol

from cachestream.config import require
from cachestream.errors import ConfigError, SampleError, SourceError
from cachestream.listing.names import Names
from cachestream.listing.patterns import absolute, extension_of, local_path, parent_of
from cachestream.transport.file_objects import open_file
from cachestream.transport.metering import PIECE_BYTES
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact
from cachestream.transport.remote_object import open_stream
from cachestream.transport.stream import StreamFile

_DECIMAL: Final = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """The labels of files: `values`, int64 or float64 `[files]`, and their `names`, or () for numbers."""

    values: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        self.values.flags.writeable = False  # as processes may share them

    def __getitem__(self, index: int) -> int | float:
        value: int | float = self.values[index].item()
        return value

    @property
    def digest(self) -> str:
        """xxh3 (64 bits, hexadecimal) of all labels in their order."""
        state = xxhash.xxh3_64(np.ascontiguousarray(self.values).data)
        state.update("\0".join(self.names).encode("utf-8", "surrogatepass"))
        return state.hexdigest()


class LabelsBuilder:
    """A builder of Labels, which keeps each distinct label once, and 8 bytes a file."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._values = array("q")

    def add(self, label: Any) -> None:
        self._values.append(self._numbers.setdefault(label, len(self._numbers)))

    def labels(self) -> Labels:
        """Return all labels: numbers if all are written as such, else their ranks among the sorted texts."""
        known, index = list(self._numbers), np.frombuffer(self._values, np.int64)
        for kind, read in NUMBER_TYPES:
            with suppress(ValueError, TypeError, OverflowError):  # not all are written as such numbers
                return Labels(np.array([read(value) for value in known], kind)[index], ())
        texts = list(map(str, known))
        names = sorted(set(texts))
        places = {name: place for place, name in enumerate(names)}
        return Labels(np.array([places[text] for text in texts], np.int64)[index], tuple(names))


def parse_int(value: Any) -> int:
    """Return `value` as an int. Raises ValueError unless it is written as one: "007" and "1_0" are names."""
    number = int(value)
    if isinstance(value, float) or (number != value and str(number) != value):
        raise ValueError(value)
    return number


def parse_float(value: Any) -> float:
    """Return `value` as a float. Raises ValueError unless it is a decimal: "nan" and "inf" are names."""
    number = float(value)
    if isinstance(value, str) and not (_DECIMAL.fullmatch(value) and math.isfinite(number)):
        raise ValueError(value)
    return number


# In the order in which texts are tried.
NUMBER_TYPES: Final[tuple[tuple[type, Callable[[Any], float]], ...]] = (
    (int, parse_int),
    (float, parse_float),
)

Row = tuple[str, Any]  # a URL, and its label or None

_URL_COLUMNS: Final = ("url", "path", "file", "filename", "file_name", "uri", "key", "image")
_PARQUET: Final = (".parquet", ".pq")
_TABLES: Final = {".csv": ",", ".tsv": "\t"}
_OBJECTS: Final = (".json", ".jsonl", ".ndjson")
_ROWS_PER_BATCH: Final = 65_536
_LONGEST_LINE: Final = 1 << 20


@dataclass(frozen=True, slots=True, repr=False)
class Manifest:
    """A list of files in a file, for `open_source` and for every source of files.

    url: the path or URL of the list. With one of the endings `.csv`, `.tsv` and `.parquet` it is a table,
        otherwise a text with a URL on every line that is not empty and does not begin with "#". Texts, CSV
        and TSV may be compressed (`.gz`).
    column: the column of the URLs, as the first row names it. Needed if there are several columns, and not
        exactly one is called "url", "path", "file", "filename", "file_name", "uri", "key" or "image".
    label: a column of labels, for `FileSource`: numbers, or names, which become their ranks among all sorted
        names (`source.label_names`).
    base: the folder of relative names; that of the manifest unless given.
    storage_options: for opening the manifest; those of the source unless given, if both lie on one remote.
        May hold secrets, which are shown nowhere.

    The files are not looked up: a missing one is counted when it is read. They keep the order of the list,
    and a file that is listed twice comes twice. Iterating gives the URLs.
    """

    url: str | os.PathLike[str]
    column: str | None = None
    label: str | None = None
    base: str | os.PathLike[str] | None = None
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        url: Any = self.url
        if not isinstance(url, str | os.PathLike) or not os.fspath(url):
            raise ConfigError("Manifest takes the path or URL of one file, which lists the others")
        if self._ending.removesuffix(".gz").endswith(_OBJECTS):
            raise ConfigError(
                f"{self.shown}: a manifest is a text with a URL on every line, or a .csv, .tsv or .parquet "
                "table, and not JSON: write its URLs and labels as one of these"
            )
        if self._is_text and (self.column is not None or self.label is not None):
            raise ConfigError(
                f"{self.shown}: a text has no columns; column= and label= are for .csv and .parquet"
            )

    def __repr__(self) -> str:
        named = {"column": self.column, "label": self.label}
        chosen = "".join(f", {name}={redact(value)!r}" for name, value in named.items() if value is not None)
        base = "" if self.base is None else f", base={redact(os.fspath(self.base))!r}"
        return f"Manifest({self.shown!r}{chosen}{base})"

    @property
    def shown(self) -> str:
        """The URL as shown in messages."""
        return redact(os.fspath(self.url))

    @property
    def identity(self) -> tuple[str, ...]:
        """The parts of a fingerprint that name the list."""
        named = {"column": self.column, "label": self.label, "base": self.base}
        # Redacted by themselves: behind a prefix they would not be known as URLs.
        where = redact(absolute(os.fspath(self.url)))
        chosen = (f"{name}={redact(os.fspath(value))}" for name, value in named.items() if value is not None)
        return (f"manifest:{where}", *chosen)

    def __iter__(self) -> Iterator[str]:
        return (url for url, _ in self.rows())

    def rows(self, storage_options: Mapping[str, Any] | None = None) -> Generator[Row, None, None]:
        """Yield every URL with its label (a number, a text, or None); the list is never in memory.

        `storage_options` are those of the data. Raises ConfigError for missing columns, and the errors of
        `map_errors`.
        """
        where = os.fspath(self.url)
        options = self.storage_options
        if options is None and storage_options and self._is_beside_the_data():
            options = storage_options
        remote = Remote(where, options)
        joined = _join_to(self._base(where), self.shown)
        try:
            with (
                map_errors(self.shown, secrets=remote.secrets),
                _opened(remote, where, self.shown, self._ending) as file,
            ):
                try:
                    for name, label in self._entries(file):
                        yield joined(name), label
                except ConfigError:  # a ValueError, too
                    raise
                except (csv.Error, zlib.error, EOFError, ValueError) as error:
                    raise SourceError(f"{self.shown}: the manifest cannot be read: {error}") from error
        except SampleError as error:  # the list is not one file of many
            raise SourceError(str(error)) from None

    @property
    def _ending(self) -> str:
        return redact(os.fspath(self.url)).partition("?")[0].lower()

    @property
    def _is_text(self) -> bool:
        return not self._ending.removesuffix(".gz").endswith((*_TABLES, *_PARQUET))

    def _is_beside_the_data(self) -> bool:
        """Return whether the list lies on the remote of the data, as far as its URL and `base` tell."""
        if self.base is not None:
            return bool(get_protocol(os.fspath(self.base)) == get_protocol(os.fspath(self.url)))
        return not _is_local(os.fspath(self.url))

    def _base(self, where: str) -> str:
        if self.base is not None:
            return absolute(os.fspath(self.base)).rstrip("/") + "/"
        where = absolute(where).partition("?")[0]
        return where[: where.rfind("/") + 1]

    def _entries(self, file: Any) -> Iterator[Row]:
        if self._ending.endswith(_PARQUET):
            return self._parquet(file)
        delimiter = _TABLES.get(self._ending.removesuffix(".gz")[-4:])
        if delimiter is not None:
            return self._table(_sound_rows(file, delimiter))
        names = (line.strip() for line in _lines(file))
        return ((name, None) for name in names if name and not name.startswith("#"))

    def _table(self, rows: Iterator[list[str]]) -> Iterator[Row]:
        try:
            header = next(rows)
        except StopIteration:
            raise SourceError(f"{self.shown}: the manifest is empty") from None
        url_at, label_at = self._columns(header)
        for number, row in enumerate(rows, 2):
            if not row:
                continue
            if len(row) <= max(url_at, label_at):
                raise SourceError(f"{self.shown}: a row of {len(row)} columns, below {len(header)} names")
            url, label = row[url_at].strip(), None if label_at < 0 else row[label_at].strip()
            if not url or label == "":
                empty = header[label_at if url else url_at].strip()
                raise SourceError(f"{self.shown}: row {number} has nothing in its column {redact(empty)!r}")
            yield url, label

    def _parquet(self, file: Any) -> Iterator[Row]:
        table = require("pyarrow.parquet", "parquet", "a Parquet manifest").ParquetFile(file)
        header = list(table.schema_arrow.names)
        url_at, label_at = self._columns(header)
        wanted = [header[url_at]] + ([header[label_at]] if label_at >= 0 else [])
        for batch in table.iter_batches(_ROWS_PER_BATCH, columns=wanted):
            urls = batch.column(wanted[0]).to_pylist()
            labels = batch.column(wanted[1]).to_pylist() if label_at >= 0 else [None] * len(urls)
            for url, label in zip(urls, labels, strict=True):
                if not (isinstance(url, str) and url) or (label is None and label_at >= 0):
                    raise SourceError(
                        f"{self.shown}: {wanted} must be there in every row, and the first a text"
                    )
                yield url, int(label) if isinstance(label, bool) else label

    def _columns(self, header: list[str]) -> tuple[int, int]:
        """Return the indices of the columns of URLs and of labels; -1 for no labels."""
        names = [name.strip() for name in header]
        column = self.column
        if column is None:
            usual = [name for name in names if name.lower() in _URL_COLUMNS and name != self.label]
            column = names[0] if len(names) == 1 else usual[0] if len(usual) == 1 else None
            if len(names) == 1 and ("/" in names[0] or extension_of(names[0])):
                raise ConfigError(
                    f"{self.shown}: its first row names the column, and {redact(names[0])!r} looks like a "
                    "file: write 'url' above it, end the list's name in .txt, or give column="
                )
        wanted = {"column": column, "label": self.label}
        for option, name in wanted.items():
            if name not in names and (name is not None or option == "column"):
                shown = ", ".join(redact(known) for known in names[:20])
                raise ConfigError(
                    f"{self.shown}: give {option}= one of its columns: {shown}"
                    + ("" if name is None else f" (not {redact(name)!r})")
                )
        assert column is not None
        return names.index(column), -1 if self.label is None else names.index(self.label)


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE:
            raise ValueError(f"a line has {_LONGEST_LINE:,} characters and more")
        yield line


def _sound_rows(text: io.TextIOWrapper, delimiter: str) -> Iterator[list[str]]:
    """Yield the rows of a table. Raises ValueError where a quote that is not closed takes lines into a
    value.
    """
    taken = list[str]()  # the lines of one row

    def lines() -> Iterator[str]:
        for line in _lines(text):
            taken.append(line)
            yield line

    for number, row in enumerate(csv.reader(lines(), delimiter=delimiter, skipinitialspace=True), 1):
        if len(taken) > 1 and not is_sound_csv(taken, delimiter, skipinitialspace=True):
            raise ValueError(
                f"row {number}: a quote takes {len(taken)} lines into one value; if the quote belongs to the "
                "text, "
                'write "" inside a quoted value'
            )
        taken.clear()
        yield row


def is_sound_csv(lines: Iterable[str], delimiter: str, *, skipinitialspace: bool = False) -> bool:
    """Return whether each quote that opens a value in `lines` is closed at its end."""
    try:
        for _ in csv.reader(lines, delimiter=delimiter, skipinitialspace=skipinitialspace, strict=True):
            pass
    except csv.Error:
        return False
    return True


@contextmanager
def _opened(remote: Remote, url: str, shown: str, ending: str) -> Iterator[Any]:
    """Open a list: Parquet as bytes, others as text, whose lines end with line feeds alone."""
    path = remote.path_of(url)
    if ending.endswith(_PARQUET):
        with open_file(remote, path, shown) as file:
            yield file
        return
    with open_stream(remote, path, shown) as stream:
        raw: Any = io.BufferedReader(StreamFile(stream), PIECE_BYTES)
        with (
            gzip.open(raw) if ending.endswith(".gz") else raw as data,
            io.TextIOWrapper(data, "utf-8-sig", "surrogateescape", newline="\n") as text,
        ):
            yield text


def _is_local(url: str) -> bool:
    return get_protocol(url) in ("file", "local")


def _join_to(base: str, shown: str) -> Callable[[str], str]:
    """Return a function that turns a name in the list into a URL, or into a path if `base` is a path."""
    is_local = _is_local(base)

    def joined(name: str) -> str:
        if "://" in name:
            if not is_local and name.startswith(("file://", "local://")):
                raise ConfigError(
                    f"{shown}: a list on a remote names files of this machine; give base= or a local list"
                )
            return name
        if not is_local:
            return base + name.lstrip("/")
        return name if name.startswith(("/", "~")) else base + name

    return joined


def start_of(manifest: Manifest, storage_options: Mapping[str, Any] | None = None) -> str:
    """Return the first URL of a manifest. Raises SourceError if there is none."""
    with closing(manifest.rows(storage_options)) as rows:
        for url, _ in rows:
            return url
    raise SourceError(f"{manifest.shown}: the manifest names no files")


def read_manifest(
    manifest: Manifest,
    remote: Remote,
    storage_options: Mapping[str, Any] | None,
    wanted: tuple[str, ...],
) -> tuple[str, Names, Labels | None]:
    """Return the deepest folder that holds all files of a manifest, their names below it, and their labels.

    `wanted` are the endings of the files to keep; () for all. Raises ConfigError for a URL of another scheme
    than that of `remote`.
    """
    root, labels = "", LabelsBuilder()

    def paths(rows: Iterator[Row]) -> Iterator[str]:
        nonlocal root
        kept = (row for row in rows if _ends_in(row[0], wanted)) if wanted else rows
        for number, (url, label) in enumerate(kept):
            path = _path_of(remote, url)
            if not number:
                root = parent_of(path.partition("?")[0])
            while not path.startswith(root):
                root = parent_of(root[:-1])
            if manifest.label is not None:
                labels.add(label)
            yield path

    with closing(manifest.rows(storage_options)) as rows:
        names = Names(paths(rows))
    if not names:
        raise SourceError(
            f"{manifest.shown}: no file of the manifest ends in {', '.join(wanted)}; check extensions="
        )
    cut = 0 if root.endswith("://") else len(root)  # not up to a URL's scheme alone
    below = Names(name[cut:] for name in names)
    return root[:cut], below, None if manifest.label is None else labels.labels()


def _ends_in(url: str, wanted: tuple[str, ...]) -> bool:
    return (redact(url) if "?" in url or "#" in url else url).lower().endswith(wanted)


def _path_of(remote: Remote, url: str) -> str:
    is_same = _is_local(url) if remote.is_local else get_protocol(url) == remote.protocol
    if "::" in url or not is_same:
        raise ConfigError(
            f"{redact(url)}: all URLs of one source must have the same scheme, {remote.protocol}://"
        )
    return local_path(url) if remote.is_local else remote.path_of(url)
