"""Windows of large arrays, local or remote, in the formats of arrays that are registered, such as Zarr."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Literal

import fsspec
import numpy as np
import numpy.typing as npt
import xxhash
from fsspec.utils import get_protocol

from cachestream.errors import (
    CacheStreamError,
    ConfigError,
    SampleError,
    SourceError,
    SourceUnavailableError,
)
from cachestream.listing.file_list import Url
from cachestream.listing.patterns import MAGIC, WEB_MAGIC, absolute, expand_braces, local_path
from cachestream.sources.array_windows import (
    AlignedArrays,
    ArrayFile,
    Window,
    WindowOptions,
    open_aligned,
)
from cachestream.sources.base import check_unit, whole_units
from cachestream.sources.file_units import FileUnits
from cachestream.sources.registry import array_files
from cachestream.transport.local_files import is_on_disk
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import map_errors, redact

Urls = Url | Sequence[Url]

OPENED_AT_ONCE: Final = 16
_OWN_FIELDS: Final = ("start", "index")
_STORABLE: Final = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


class ArraySource:
    """Windows of arrays: random ones without end, or each of a grid once a pass. A unit is a window.

    arrays: the URL of a `.npy` file, a Zarr array (v2 or v3: `a.zarr/image`), an HDF5 dataset
    (`a.h5::/image`, or `dataset=`) or a file of tokens (`train.bin`); a wildcard, a `{000..127}` range or a
    list of them, to draw from all; or a dict of these by name, `{"image": …, "mask": …}`, to read the same
    position of each.

    window: a length along the first axis, or a tuple with a length for each axis. None, and axes left out,
    stand for the whole axis. The axes with a length are the cut axes. In a dict of arrays, the cut axes must
    have the same lengths in all arrays, in order; a dict of windows by name tells which axes they are, as in
    `{"image": (None, 256, 256), "mask": (256, 256)}`.

    windows: "random" or "grid". stride: the distance of window positions along the cut axes; the default is
    1 for random windows, and the window's size in a grid; "chunks" aligns windows with chunks. The last
    position is always flush with the end of the array, so that every element can be drawn. jitter: move each
    window at random by up to so many elements. Both are an int, or a tuple with an int for each cut axis.

    weights: how random windows are drawn from several arrays: in proportion to the positions in each (None),
    "equal", or a number for each. With the latter two an array is opened only when it is drawn.

    num_units: windows a pass; None: random windows are endless.

    dtype: the type of the tokens in `.bin` files, such as "uint16". None: that of the index `.idx` beside the
    file (Megatron-LM), or of its header (llm.c), else the one that the first tokens look like, which is
    logged.

    A sample has "array" (or the names given), as stored; "start", int64 `[cut axes]`, the first
    element of the window; and "index", the number of the array, if there are several. The key is
    `name[10:20,30:40]`, for random windows with the unit: `name[10:20,30:40]#7`.

    Raises ConfigError for windows that do not fit, SourceError for a URL that is missing, forbidden or no
    array, and SourceUnavailableError for a remote that does not answer.
    """

    def __init__(
        self,
        arrays: Urls | Mapping[str, Urls],
        *,
        window: Window | Mapping[str, Window] | None = None,
        windows: Literal["random", "grid"] = "random",
        stride: int | Sequence[int] | Literal["chunks"] | None = None,
        jitter: int | Sequence[int] | None = None,
        weights: Sequence[float] | Literal["equal"] | None = None,
        num_units: int | None = None,
        dataset: str | None = None,
        dtype: npt.DTypeLike | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        given = _urls_by_name(arrays)
        if window is None:
            raise ConfigError(
                "ArraySource needs window=: a length along the first axis, or one for each axis, "
                "as in (256, 256, None)"
            )
        num_units, dtype = whole_units(num_units), _name_of_dtype(dtype)
        is_grid = _check_windows(windows, weights, num_units)
        if stride is None:
            stride = _as_stride(window) if is_grid else 1
        if isinstance(window, Mapping) and set(window) != set(given):
            raise ConfigError(
                f"window= has {sorted(window)}, the arrays are {sorted(given)}: give one for each"
            )
        self._cut = WindowOptions(window, stride, jitter)
        self._locations = _locate_all(given, storage_options, dataset, dtype)
        self._names = _short_names(next(iter(self._locations.values())))
        self._opened: dict[int, AlignedArrays] = {}
        self._grid: FileUnits | None = None
        if weights is None:
            counts = self._open_all()
            shares = np.asarray(counts, np.float64)
            self._grid = FileUnits(counts) if is_grid else None
        else:
            self._arrays(0)
            shares = _shares(weights, len(self._names))
        self._draw_ends = np.cumsum(shares) / shares.sum()
        self.num_units = num_units if self._grid is None else len(self._grid)
        self.fingerprint = _fingerprint(given, windows, self._cut, weights, num_units, dataset, dtype)
        names = chr(0).join(file.name for files in self._locations.values() for file in files)
        self.listing_digest = xxhash.xxh3_64_hexdigest(names.encode("utf-8", "surrogateescape"))

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the one window of `unit`. Raises as `Source.read`."""
        check_unit(self, unit, self.num_units)
        index, place = self._locate_window(unit, rng)
        arrays = self._arrays(index)
        sample: dict[str, Any] = {}
        for name, files in self._locations.items():
            file = files[index]
            with map_errors(file.shown, one_of_many=len(files) > 1, secrets=file.remote.secrets):
                sample[name] = arrays.read(name, place)
        sample["start"] = np.array(place, np.int64)
        if len(self._names) > 1:
            sample["index"] = index
        area = ",".join(f"{at}:{at + size}" for at, size in zip(place, arrays.grid.sizes, strict=True))
        yield f"{self._names[index]}[{area}]" + ("" if self._grid is not None else f"#{unit}"), sample

    @property
    def is_on_disk(self) -> bool:
        """True if the arrays lie on disks of this machine."""
        first = [files[0] for files in self._locations.values()]
        return all(one.remote.is_local and is_on_disk(one.path) for one in first)

    def _locate_window(self, unit: int, rng: np.random.Generator) -> tuple[int, tuple[int, ...]]:
        """Return the number of the array of `unit`, and the start of its window along the cut axes."""
        if self._grid is not None:
            index, number = map(int, self._grid.locate(unit))
            grid = self._arrays(index).grid
            return index, grid.move(grid.at(number), rng)
        index = 0
        if len(self._names) > 1:
            index = int(np.searchsorted(self._draw_ends, rng.random(), side="right"))
        return index, self._arrays(index).grid.draw(rng)

    def _arrays(self, index: int) -> AlignedArrays:
        """Return the arrays number `index`, opened when they are first needed."""
        arrays = self._opened.get(index)
        if arrays is None:
            try:
                arrays = open_aligned(
                    {name: files[index] for name, files in self._locations.items()}, self._cut
                )
                self._check_alike(index, arrays)
            except CacheStreamError as error:
                if not self._opened or isinstance(error, SourceUnavailableError):
                    raise
                raise SampleError(str(error)) from error  # other arrays may be usable
            self._opened[index] = arrays
        return arrays

    def _open_all(self) -> list[int]:
        """Open all arrays and return the number of positions in each. Raises if any is unusable."""
        self._arrays(0)
        with ThreadPoolExecutor(OPENED_AT_ONCE) as pool:
            opened = list(pool.map(self._required, range(len(self._names))))
        return [arrays.grid.count for arrays in opened]

    def _required(self, index: int) -> AlignedArrays:
        try:
            return self._arrays(index)
        except SampleError as error:
            if isinstance(error.__cause__, ConfigError):
                raise ConfigError(
                    f"{error}; leave it out, or give weights= to skip what does not fit"
                ) from None
            raise

    def _check_alike(self, index: int, arrays: AlignedArrays) -> None:
        first = self._opened.get(0)
        if first is not None and arrays.dtypes != first.dtypes:
            raise ConfigError(
                f"{self._names[index]} holds {arrays.dtypes}, {self._names[0]} {first.dtypes}: "
                "all arrays must have the same types and numbers of axes"
            )

    def __repr__(self) -> str:
        units = "endless" if self.num_units is None else f"{self.num_units:,} windows"
        more = f" and {len(self._names) - 1:,} more" if len(self._names) > 1 else ""
        return f"<ArraySource {self._names[0]}{more}, {units}>"


def _urls_by_name(arrays: Any) -> dict[str, list[str]]:
    """Return the URLs by name; arrays that the user gave no name for are named "array"."""
    given = arrays if isinstance(arrays, Mapping) else {"array": arrays}
    found: dict[str, list[str]] = {}
    for name, urls in given.items():
        several: list[Any] = [urls] if isinstance(urls, str | os.PathLike) else list(urls)
        if not several or not all(isinstance(url, str | os.PathLike) and os.fspath(url) for url in several):
            raise ConfigError(
                "ArraySource takes the URL of an array, a list of them, or a dict of these by name"
            )
        if not isinstance(name, str) or not name or name in _OWN_FIELDS:
            raise ConfigError(
                f"{name!r} is no name for an array: give text other than {', '.join(_OWN_FIELDS)}"
            )
        found[name] = [os.fspath(url) for url in several]
    if not found:
        raise ConfigError("ArraySource takes at least one array")
    return found


def _name_of_dtype(dtype: Any) -> str | None:
    try:
        return None if dtype is None else np.dtype(dtype).name
    except TypeError:
        raise ConfigError(f"dtype={dtype!r}: give the type of the tokens, such as 'uint16'") from None


def _check_windows(windows: str, weights: Any, num_units: int | None) -> bool:
    """Return whether windows form a grid. Raises ConfigError for options that exclude each other."""
    if windows not in ("random", "grid"):
        raise ConfigError(f"windows={windows!r}: give 'random' or 'grid'")
    if windows == "grid" and (weights is not None or num_units is not None):
        raise ConfigError("windows='grid' reads each window once a pass: leave out weights= and num_units=")
    return windows == "grid"


def _as_stride(window: Any) -> tuple[int, ...]:
    """Return the lengths of `window` along the cut axes: the stride of adjacent windows."""
    one = next(iter(window.values())) if isinstance(window, Mapping) else window
    return tuple(size for size in (one if isinstance(one, tuple | list) else (one,)) if size is not None)


# --- where arrays lie --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArrayLocation:
    """The place of an array: its path for the driver, and the dataset in that file."""

    remote: Remote
    path: str = field(repr=False)  # may be signed
    dataset: str | None
    dtype: str | None = None

    @property
    def shown(self) -> str:
        """The path as shown in messages."""
        return self.remote.shown(self.path)

    @property
    def name(self) -> str:
        """A unique name: the path as shown, and the dataset in it."""
        return self.shown if self.dataset is None else f"{self.shown}::/{self.dataset.lstrip('/')}"

    def open(self) -> ArrayFile:
        """Open the array. Raises ConfigError for one that has no windows of numbers."""
        kind = array_at(self.path)
        if kind is None:
            endings = sorted(one for kind in array_files().values() for one in kind.array_endings)
            raise ConfigError(f"{self.shown}: ArraySource reads {', '.join(endings)}")
        if self.dtype is not None and not kind.is_raw:
            raise ConfigError(f"{self.shown}: dtype= is for files of tokens, and this one tells its own type")
        options = {"dtype": self.dtype} if kind.is_raw else {}
        array = kind(self.remote, self.path, self.shown, self.dataset, **options)
        # The kind comes first: numpy's newer dtypes, such as variable-length strings, have no byte order.
        if array.dtype.kind not in "biufc" or array.dtype.newbyteorder("=") not in _STORABLE:
            raise ConfigError(f"{array.shown}: has dtype {array.dtype}; windows are of numbers or bools")
        if not array.shape:
            raise ConfigError(f"{array.shown}: is a single value, which has no windows")
        return array


def array_at(path: str) -> type[ArrayFile] | None:
    """Return the format of the array at `path`, by its ending, or None."""
    return next((kind for kind in array_files().values() if kind.is_at(path)), None)


@cache
def _in_file() -> re.Pattern[str]:
    endings = (one for kind in array_files().values() if kind.holds_datasets for one in kind.array_endings)
    either = "|".join(map(re.escape, endings))
    return re.compile(rf"(.+(?:{either}))::/?([^:]+)", re.IGNORECASE | re.DOTALL)


def split_dataset(url: str) -> tuple[str, str | None]:
    """Split `file.h5::/group/data` into the file and the dataset's name, which is None for any other URL."""
    match = _in_file().fullmatch(url)
    return (url, None) if match is None or "://" in match[2] else (match[1], match[2])


def locate(remote: Remote, url: str, dataset: str | None, dtype: str | None) -> list[ArrayLocation]:
    """Return the arrays that `url` stands for; those found by a wildcard in the order of their names.

    Raises ConfigError for a dataset named twice, SourceError if a wildcard finds nothing, and the errors of
    `map_errors`.
    """
    outer, inner = split_dataset(url)
    if inner is not None and dataset is not None:
        raise ConfigError(f"{redact(url)}: give the dataset in the path or as dataset=, not both")
    with map_errors(redact(outer), secrets=remote.secrets):
        paths = _local_paths(outer) if remote.is_local else _remote_paths(remote, outer)
    if not paths:
        raise SourceError(f"{redact(outer)}: nothing found; check the path or the pattern")
    return [ArrayLocation(remote, path, inner or dataset, dtype) for path in paths]


def _local_paths(url: str) -> list[str]:
    path = local_path(url)
    if os.path.exists(path):  # a name may contain braces and stars
        return [path]
    paths = []
    for one in expand_braces(path):
        paths += sorted(glob.glob(one, recursive=True)) if MAGIC.search(one) else [one]
    return paths


def _remote_paths(remote: Remote, url: str) -> list[str]:
    if "::" in url:
        return [remote.path_of(url)]
    strip = fsspec.get_filesystem_class(remote.protocol)._strip_protocol
    paths = [str(strip(one)) for one in expand_braces(url)]
    if remote.is_web:  # in a web URL "?" begins a query
        is_pattern = any(WEB_MAGIC.search(path.partition("?")[0]) for path in paths)
    else:
        is_pattern = any(map(MAGIC.search, paths))
    if not is_pattern:
        return paths
    return [path for one in paths for path in sorted(remote.ask("glob", one))]


def _locate_all(
    given: Mapping[str, Sequence[str]],
    storage_options: Mapping[str, Any] | None,
    dataset: str | None,
    dtype: str | None,
) -> dict[str, list[ArrayLocation]]:
    remotes: dict[str, Remote] = {}

    def find(url: str) -> list[ArrayLocation]:
        outer, _ = split_dataset(url)
        kind = outer if "::" in outer else get_protocol(outer)  # chained URLs share no filesystem
        if kind not in remotes:
            remotes[kind] = Remote(outer, storage_options)
        return locate(remotes[kind], url, dataset, dtype)

    found = {name: [file for url in urls for file in find(url)] for name, urls in given.items()}
    counts = {name: len(files) for name, files in found.items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(f"arrays drawn together must be equally many, not {counts}")
    return found


# --- the identity of the source ----------------------------------------------------------------


def _short_names(files: Sequence[ArrayLocation]) -> list[str]:
    """Return the paths of `files` without the folders that all of them share."""
    names = [file.name for file in files]
    parts = [name.split("/") for name in names]
    shared = 0
    if len(names) == 1:
        stem = files[0].shown
        zarr = stem.lower().find(".zarr")
        return [names[0][stem[: zarr if zarr >= 0 else None].rfind("/") + 1 :]]
    while all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return ["/".join(part[shared:]) for part in parts]


def _shares(weights: Any, count: int) -> npt.NDArray[np.float64]:
    if isinstance(weights, str):
        if weights != "equal":
            raise ConfigError(f"weights={weights!r}: give 'equal', or a number for each array")
        return np.ones(count)
    shares = np.asarray(list(weights), np.float64)
    if shares.shape != (count,) or not np.isfinite(shares).all() or (shares < 0).any() or not shares.any():
        raise ConfigError(f"weights=: give {count} numbers of at least 0, not all 0: one for each array")
    return shares


def _fingerprint(
    given: Mapping[str, Sequence[str]],
    windows: str,
    cut: WindowOptions,
    weights: Any,
    num_units: int | None,
    dataset: Any,
    dtype: Any,
) -> str:
    parts = []
    for name, urls in given.items():
        outers = [split_dataset(url)[0] for url in urls]
        where = [redact(absolute(one)) + url.removeprefix(one) for one, url in zip(outers, urls, strict=True)]
        text = chr(0).join(where).encode("utf-8", "surrogateescape")
        more = f" and {len(where) - 1} more {xxhash.xxh3_64_hexdigest(text)}" if len(where) > 1 else ""
        parts.append(f"{name}={where[0]}{more}")
    options = {
        "dataset": dataset,
        "dtype": dtype,
        "jitter": cut.jitter,
        "num_units": num_units,
        "stride": cut.stride,
        "weights": weights if weights is None or isinstance(weights, str) else list(map(float, weights)),
        "window": dict(cut.window) if isinstance(cut.window, Mapping) else cut.window,
    }
    parts += [f"{name}={value}" for name, value in options.items() if value is not None]
    return f"arrays:{windows}|" + "|".join(parts)
