"""Samples returned by a function: random windows of an array, simulations, anything."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import xxhash

from cachestream.errors import ConfigError
from cachestream.listing.file_list import check_unit, whole_units
from cachestream.sources.user_code import Calls, foreign_errors


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
        self._num_units = whole_units(num_units)
        self._calls = Calls(thread_safe)
        self.fingerprint = f"function:{_name(fn)}:{fingerprint_of(fn)}"
        self.listing_digest = ""

    @property
    def num_units(self) -> int | None:
        return self._num_units

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        """Yield the one sample of `unit`, or none. Raises SampleError if `fn` raises."""
        check_unit(self, unit, self._num_units)
        with self._calls.one(), foreign_errors(f"{_name(self._fn)}(rng) for unit {unit}"):
            sample = self._fn(rng)
        if sample is not None:
            yield str(unit), sample

    def __repr__(self) -> str:
        units = "endless" if self._num_units is None else f"{self._num_units:,} units"
        return f"<CallableSource {_name(self._fn)}, {units}>"


def _check_takes_rng(fn: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without one
        return
    try:
        signature.bind(None)
    except TypeError:
        raise ConfigError(
            f"{_name(fn)}{signature} cannot be called as fn(rng): it must take a numpy.random.Generator"
        ) from None


def _name(fn: Any) -> str:
    if isinstance(fn, functools.partial):
        return _name(fn.func)
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    return f"{_module(named)}.{named.__qualname__}"


def _module(named: Any) -> str:
    """Return the module's name.

    The main script is "__main__" also in a process spawned by `multiprocessing`, so that one cache serves
    both processes.
    """
    return "__main__" if named.__module__ == "__mp_main__" else str(named.__module__)


def fingerprint_of(fn: Callable[..., Any]) -> str:
    """Return a digest of the code of `fn` and of the plain values bound to it, 16 hexadecimal digits.

    It is the same in every process of one Python version. Values other than numbers, strings and tuples
    count by their type alone, and functions that `fn` calls do not count.
    """
    state = xxhash.xxh3_64()
    for part in _parts(fn):
        encoded = part.encode("utf-8", "surrogatepass")
        state.update(f"{len(encoded)}:".encode())
        state.update(encoded)
    return state.hexdigest()


_PLAIN: Final = bool | int | float | complex | str | bytes | types.NoneType | types.EllipsisType


def _parts(value: Any) -> Iterator[str]:
    """Yield strings that identify `value`, independent of memory addresses and of the order of sets."""
    if isinstance(value, types.CodeType):
        yield from ("code", value.co_code.hex(), *value.co_names)
        yield from _parts(value.co_consts)
    elif isinstance(value, _PLAIN):
        yield from (type(value).__name__, repr(value))
    elif isinstance(value, tuple):
        yield f"tuple{len(value)}"
        for item in value:
            yield from _parts(item)
    elif isinstance(value, frozenset):
        yield from ("frozenset", *sorted(repr(item) for item in value))
    elif isinstance(value, np.generic):
        yield from (type(value).__name__, repr(value.item()))
    else:
        yield from _object_parts(value)


def _object_parts(value: Any) -> Iterator[str]:
    if isinstance(value, functools.partial):
        yield "partial"
        yield from _parts(value.func)
        yield from _parts((*value.args, *sorted(value.keywords.items())))
    elif isinstance(value, types.MethodType):
        yield from _state_parts(value.__self__)
        yield from _slot_parts(value.__self__)
        yield from _parts(value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif hasattr(value, "__qualname__"):  # a class, a builtin
        yield _name(value)
    else:
        yield from _state_parts(value)
        called = vars(type(value)).get("__call__")
        if callable(value) or dataclasses.is_dataclass(value):
            yield from _slot_parts(value)
        if isinstance(called, types.FunctionType):
            yield from _function_parts(called)


def _state_parts(instance: Any) -> Iterator[str]:
    """Yield the type of `instance`, and its plain attributes."""
    yield _name(type(instance))
    yield from _attribute_parts(getattr(instance, "__dict__", {}))


def _slot_parts(instance: Any) -> Iterator[str]:
    """Yield the plain attributes in slots. Not used for every value: a path fills its slots as it is used."""
    names = {
        name
        for kind in type(instance).__mro__
        if "__slots__" in vars(kind)
        for name, member in vars(kind).items()
        if isinstance(member, types.MemberDescriptorType)
    }
    yield from _attribute_parts({name: getattr(instance, name) for name in names if hasattr(instance, name)})


def _attribute_parts(attributes: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(attributes.items()):
        yield name
        if isinstance(value, _PLAIN | tuple | np.generic):
            yield from _parts(value)


def _function_parts(fn: types.FunctionType) -> Iterator[str]:
    yield from (_module(fn), fn.__qualname__)
    yield from _parts(fn.__code__)
    yield from _parts(fn.__defaults__ or ())
    if fn.__kwdefaults__:
        yield from _parts(tuple(sorted(fn.__kwdefaults__.items())))
    for cell in fn.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not yet bound
            content = None
        if content is not fn:
            yield from _parts(content if not isinstance(content, types.FunctionType) else content.__code__)
