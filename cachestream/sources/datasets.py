"""Samples of Python objects: of functions, of map-style datasets by index, and of iterable ones in order."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import xxhash

from cachestream.config import check_count
from cachestream.errors import ConfigError, SampleError
from cachestream.sources.base import Problems, check_unit, whole_units
from cachestream.sources.decode.images import stack_images
from cachestream.sources.fields import Defaults, empty_lists, plain_fields
from cachestream.sources.user_code import CallLock, by_value, fingerprint_of, guard_user_code, name_of


class CallableSource:
    """`fn(rng) -> sample`, called once for every unit; the key is the unit's number.

    `rng` is a `numpy.random.Generator` of the unit's own: if `fn` draws from it alone, the same samples come
    again. Returning None skips the unit. `num_units=None` makes the source endless; a number is the number of
    calls in a pass. A process makes one call at a time, as few functions are thread-safe; `thread_safe=True`
    lets calls overlap, which pays if they wait for a network.
    """

    def __init__(
        self,
        fn: Callable[[np.random.Generator], Any],
        num_units: int | None = None,
        *,
        thread_safe: bool = False,
    ) -> None:
        if not callable(fn):
            raise ConfigError(f"CallableSource takes a function fn(rng), not {type(fn).__name__}")
        _check_takes_rng(fn)
        self._fn = fn
        self.num_units = whole_units(num_units)
        self._call_lock = CallLock(thread_safe)
        self.fingerprint = f"function:{name_of(fn)}:{fingerprint_of(fn)}"

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the one sample of `unit`, or none. Raises SampleError if `fn` raises."""
        check_unit(self, unit, self.num_units)
        with self._call_lock.held(), guard_user_code(f"{name_of(self._fn)}(rng) for unit {unit}"):
            sample = self._fn(rng)
        if sample is not None:
            yield str(unit), sample

    def __repr__(self) -> str:
        units = "endless" if self.num_units is None else f"{self.num_units:,} units"
        return f"<CallableSource {name_of(self._fn)}, {units}>"


def _check_takes_rng(fn: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without one
        return
    try:
        signature.bind(None)
    except TypeError:
        raise ConfigError(
            f"{name_of(fn)}{signature} cannot be called as fn(rng): it must take a numpy.random.Generator"
        ) from None


def is_map_style(what: Any) -> bool:
    """Return whether `what` can be read as `what[0]` … `what[len(what) - 1]`."""
    kind = type(what)
    if isinstance(what, Mapping | str | bytes) or hasattr(kind, "iloc"):  # not indexed by position
        return False
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__")


class DatasetSource:
    """`dataset[i]` for every index; a unit is one index, the key is its number.

    `dataset` is a map-style torch Dataset, a Hugging Face dataset, a list or an array, and is pickled to the
    sampling processes. A process makes one call at a time, as few datasets are thread-safe;
    `thread_safe=True` lets calls overlap, which pays if they wait for a network.

    Nested values of a dict become the same fields as columns of Parquet: a dict becomes a field for each
    member, "field.member", and a list of strings or dicts a JSON text. An item with a None is skipped and
    counted.

    fields: a default for each optional field, `{"caption": ""}`, for items in which it is missing, None or an
    empty list, whose type nothing tells.
    """

    def __init__(
        self, dataset: Any, *, thread_safe: bool = False, fields: Mapping[str, Any] | None = None
    ) -> None:
        self._defaults = Defaults(fields)
        if hasattr(type(dataset), "__iter__") and not is_map_style(dataset):
            raise ConfigError(
                f"{type(dataset).__name__} has no dataset[0], it can only be iterated: "
                "give it to IterableSource(…)"
            )
        if not is_map_style(dataset):
            raise ConfigError(
                f"{type(dataset).__name__} has no dataset[0] … dataset[len(dataset) - 1]; "
                "wrap it in a map-style dataset, or give a function fn(rng) -> sample"
            )
        try:
            self.num_units = operator.index(len(dataset))
        except (TypeError, NotImplementedError) as error:
            raise ConfigError(f"len() of {type(dataset).__name__} fails: {error}") from None
        if self.num_units == 0:
            raise ConfigError(f"{type(dataset).__name__} is empty: a source needs at least one sample")
        self._dataset = dataset
        self._call_lock = CallLock(thread_safe)
        self._name = _full_name(type(dataset))
        own = getattr(dataset, "fingerprint", getattr(dataset, "_fingerprint", None))  # the latter is HF's
        suffix = f":{own}" if isinstance(own, str | int) else ""
        identity = f"dataset:{self._name}[{self.num_units}]{suffix}"
        self.fingerprint = "|".join((identity, *self._defaults.identity))
        self._empty = {**self._defaults.values, **empty_lists(getattr(dataset, "features", None))}

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield `dataset[unit]`. Raises SampleError if the dataset raises."""
        check_unit(self, unit, self.num_units)
        with self._call_lock.held(), guard_user_code(f"{self._name}[{unit}]"):
            sample = self._dataset[unit]
        yield str(unit), self._defaults.fill(plain_fields(sample, self._empty))

    def __repr__(self) -> str:
        return f"<DatasetSource {self._name}, {self.num_units:,} samples>"


MOST_SHARDS: Final = 1024  # units of a WebDataset, each of which opens a pipeline of its own
_WORKER: Final = "torch.utils.data._utils.worker"
_END: Final = object()
# torch's WorkerInfo is a single variable of the process.
_WORKER_INFO_LOCK: Final = CallLock(thread_safe=False)


def is_iterable(what: Any) -> bool:
    """Return whether `what` can only be read from beginning to end, but any number of times."""
    if _is_a(what, "torch.utils.data", "IterableDataset"):
        return True  # even if it has a length, or an [i] that raises
    kind = type(what)
    if isinstance(what, Iterator | Mapping | set | frozenset | str | bytes) or hasattr(kind, "iloc"):
        return False
    return hasattr(kind, "__iter__") and not is_map_style(what)


class IterableSource:
    """An iterable, read from beginning to end; a unit is a shard of it if it can be split, else all of it.

    iterable: an object whose `iter()` begins anew each time, or a function `make(shard, shards)` that returns
    an iterator, such as a generator function. It is pickled to the sampling processes, and every read has its
    own copy.

    shards: the number of parts that are read separately, in any order and by several processes. The iterable
    itself makes the split: by `.shard(num_shards, index)` if it has that (Hugging Face; default: its
    `num_shards`), otherwise by `torch.utils.data.get_worker_info()`, as in a DataLoader with so many workers
    (default: the tars of a WebDataset that splits by worker, otherwise 1, as each part of a dataset that does
    not split would be the whole).

    Samples are yielded as they are, but PIL images become uint8 `[3, H, W]` RGB, and names such as "__key__"
    are left out. Keys are "shard/number", followed by the "__key__" if there is one. A read that begins again
    skips the samples that it has yielded before, so a stream should yield the same samples in the same order.

    Nested values of a dict become fields, and `fields` has defaults, as in `DatasetSource`.

    A process makes one call at a time; `thread_safe=True` lets calls of Hugging Face's iterables and of
    functions overlap.
    """

    def __init__(
        self,
        iterable: Any,
        *,
        shards: int | None = None,
        thread_safe: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._defaults = Defaults(fields)
        if shards is not None:
            shards = check_count("shards", shards)
        self._is_function = callable(iterable) and not hasattr(type(iterable), "__iter__")
        self._name = _full_name(
            iterable if self._is_function and hasattr(iterable, "__qualname__") else type(iterable)
        )
        self._check(iterable)
        own = _own_shards(iterable)
        self._has_own = own is not None
        self.num_units = shards or own or (1 if self._is_function else _tars_to_split(iterable))
        self._check_split(iterable, own, thread_safe)
        free = thread_safe or (self._is_function and shards is None)
        self._call_lock = CallLock(thread_safe) if self._has_own or free else _WORKER_INFO_LOCK
        self._pickled = self._pickle(iterable)
        identity = f"iterable:{self._name}[{self.num_units}]:{_identity(iterable, self._is_function)}"
        self.fingerprint = "|".join((identity, *self._defaults.identity))
        self._empty = {**self._defaults.values, **empty_lists(getattr(iterable, "features", None))}

    def _check(self, iterable: Any) -> None:
        if isinstance(iterable, Iterator):
            raise ConfigError(
                f"a {self._name} can be iterated only once, and not in other processes; "
                "give what makes it: an object whose iter() begins anew, or a function make(shard, shards)"
            )
        if _is_a(iterable, "torch.utils.data", "DataLoader"):
            raise ConfigError("a DataLoader gives batches; give its dataset")
        if not self._is_function and not is_iterable(iterable):
            raise ConfigError(
                f"IterableSource takes an iterable or a function make(shard, shards), not {self._name}"
            )

    def _check_split(self, iterable: Any, own: int | None, thread_safe: bool) -> None:
        count = self.num_units
        if own is not None and count > own:
            raise ConfigError(f"shards={count}: {self._name} has {own} shards, and none can be split")
        by_worker = _is_a(iterable, "torch.utils.data", "IterableDataset")
        if count > 1 and own is None and not self._is_function and not by_worker:
            raise ConfigError(
                f"shards={count}: {self._name} has no .shard() and is no torch IterableDataset: "
                "nothing would split it; give a function make(shard, shards)"
            )
        if thread_safe and count > 1 and by_worker and own is None:
            raise ConfigError(
                "thread_safe=True: a torch dataset is told its shard by a variable of the process"
            )

    def _pickle(self, iterable: Any) -> bytes:
        try:
            return by_value(iterable)
        except Exception as error:  # pickling runs the user's code
            raise ConfigError(
                f"{self._name} cannot be sent to the background processes ({type(error).__name__}: {error}); "
                "open files and connections at the first use, or give a function make(shard, shards)"
            ) from error

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the samples of shard `unit` in order. Raises SampleError for those that cannot be used.

        After an error of the iterable itself nothing more of the shard is read.
        """
        check_unit(self, unit, self.num_units)
        seed = int(rng.integers(2**63))
        what = f"{self._name}, shard {unit} of {self.num_units}"
        with guard_user_code(what):
            copy = pickle.loads(self._pickled)  # noqa: S301  our own bytes
            info = self._worker_info(copy, unit, seed)
        iterator: Any = None
        problems = Problems(what)
        try:
            for number in itertools.count():
                where = f"{what}, sample {number}"
                with self._call_lock.held(), guard_user_code(where), _worker_info_set(info):
                    iterator = self._open(copy, unit) if iterator is None else iterator
                    sample = next(iterator, _END)
                if sample is _END:
                    break
                try:
                    with guard_user_code(where):  # an image is decoded when it is converted
                        name, sample = _key_and_fields(sample)
                    sample = self._defaults.fill(plain_fields(sample, self._empty))
                except SampleError as error:
                    problems.add(str(error))
                else:
                    yield f"{unit}/{number}{name}", sample
        except SampleError as error:  # an iterable that has raised cannot go on
            problems.add(str(error))
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                with self._call_lock.held(), contextlib.suppress(Exception):  # the read has ended
                    close()
        problems.raise_any()

    def _open(self, copy: Any, unit: int) -> Any:
        if self._is_function:
            return iter(copy(unit, self.num_units))
        if self._has_own:
            return iter(copy.shard(num_shards=self.num_units, index=unit))
        return iter(copy)

    def _worker_info(self, copy: Any, unit: int, seed: int) -> Any:
        """Return the WorkerInfo to set for the iterable; None if it needs none."""
        if self.num_units == 1 or self._has_own or self._is_function:
            return None
        kind = getattr(sys.modules.get(_WORKER), "WorkerInfo", None)
        if kind is None:
            raise SampleError(
                f"shards={self.num_units}: this torch does not let a dataset be told its shard; "
                "leave out shards="
            )
        return kind(id=unit, num_workers=self.num_units, seed=seed, dataset=copy)

    def __repr__(self) -> str:
        return f"<IterableSource {self._name}, {self.num_units:,} shards>"


@contextlib.contextmanager
def _worker_info_set(info: Any) -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` return `info` inside the block; None changes nothing."""
    if info is None:
        yield
        return
    module: Any = sys.modules[_WORKER]
    before, module._worker_info = module._worker_info, info
    try:
        yield
    finally:
        module._worker_info = before


def _is_a(what: Any, module: str, name: str) -> bool:
    """Return whether `what` is an instance of the class `module.name`, without importing it."""
    return any(kind.__name__ == name and kind.__module__.startswith(module) for kind in type(what).__mro__)


def _full_name(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def _own_shards(iterable: Any) -> int | None:
    """Return the number of shards of an iterable with a method `shard`; None for others."""
    if not callable(getattr(type(iterable), "shard", None)):
        return None
    count = getattr(iterable, "num_shards", getattr(iterable, "n_shards", None))
    try:
        return None if count is None else max(1, operator.index(count))
    except TypeError:
        return None


def _shard_urls(iterable: Any) -> list[str]:
    """Return the URLs of the tars of a WebDataset; [] for others."""
    pipeline = getattr(iterable, "pipeline", None)
    first = pipeline[0] if isinstance(pipeline, list) and pipeline else None
    urls = getattr(first, "urls", None) if type(first).__name__ == "SimpleShardList" else None
    return urls if isinstance(urls, list) else []


def _tars_to_split(iterable: Any) -> int:
    urls = _shard_urls(iterable)
    if urls and any(getattr(stage, "__name__", "") == "split_by_worker" for stage in iterable.pipeline):
        return min(len(urls), MOST_SHARDS)
    return 1


def _identity(iterable: Any, is_function: bool) -> str:
    """Return a digest that identifies the data; not the URLs themselves, which may hold secrets."""
    if is_function:
        return fingerprint_of(iterable)
    own = getattr(iterable, "fingerprint", None)
    info = getattr(iterable, "info", None)
    parts = [
        own if isinstance(own, str | int) else "",
        *_shard_urls(iterable),
        *(str(getattr(info, name, "")) for name in ("dataset_name", "config_name", "version")),
        str(getattr(iterable, "split", "")),
    ]
    return xxhash.xxh3_64_hexdigest("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"))


def _key_and_fields(sample: Any) -> tuple[str, Any]:
    """Return the suffix for the key, and the sample without fields such as "__key__"."""
    if not isinstance(sample, Mapping):
        return "", _image_array(sample) if not isinstance(sample, tuple) else tuple(map(_image_array, sample))
    key = sample.get("__key__")
    name = "/" + key.encode("utf-8", "replace").decode() if isinstance(key, str) else ""
    return name, {
        field: _image_array(value)
        for field, value in sample.items()
        if not (isinstance(field, str) and field.startswith("__"))
    }


def _image_array(value: Any) -> Any:
    """Convert a PIL image to uint8 `[3, H, W]`, a list of them to `[N, 3, H, W]`; others are unchanged."""
    if isinstance(value, list) and value and all(_is_a(one, "PIL.", "Image") for one in value):
        return stack_images(list(map(_image_array, value)))
    if not _is_a(value, "PIL.", "Image"):
        return value
    return np.ascontiguousarray(np.moveaxis(np.asarray(value.convert("RGB")), 2, 0))
