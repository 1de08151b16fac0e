"""Code of users: limits and errors of calls, fingerprints, pickling for processes without the script."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pickle import PickleBuffer
from typing import Any, Final

import cloudpickle
import numpy as np
import xxhash

from cachestream.errors import CacheStreamError, SampleError, SourceUnavailableError
from cachestream.transport import metering
from cachestream.transport.remote_errors import classify, redact_text


class CallLock:
    """A limit of one call at a time in each process, unless `thread_safe`. Picklable, fork-safe."""

    def __init__(self, thread_safe: bool) -> None:
        self._thread_safe = thread_safe
        self._pid, self._lock = os.getpid(), threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return CallLock, (self._thread_safe,)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock for one call. Report progress while waiting, as other calls may take long."""
        if self._thread_safe:
            yield
            return
        if self._pid != os.getpid():  # the parent's lock may have been held at the fork
            self._pid, self._lock = os.getpid(), threading.Lock()
        lock = self._lock
        while not lock.acquire(timeout=metering.TICK_S):
            metering.fetched(0)
        try:
            yield
        finally:
            lock.release()
            metering.fetched(0)


@contextlib.contextmanager
def guard_user_code(what: str) -> Iterator[None]:
    """Turn exceptions of user code into SampleError, or SourceUnavailableError if a network failed."""
    try:
        yield
    except CacheStreamError:
        raise
    except Exception as error:
        message = f"{what} raised {redact_text(f'{type(error).__name__}: {error}')[:500]}"
        if classify(error) == "unavailable":
            raise SourceUnavailableError(message) from error
        raise SampleError(message) from error


def call_decoder(what: str, decoder: Callable[[bytes], Any], data: bytes | memoryview) -> Any:
    """Decode `data` by the user's `decoder`, called `what` in messages. Raises as `guard_user_code` does."""
    with guard_user_code(what):
        return decoder(bytes(data))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that calls `see` with every object that is not of a builtin type."""

    def __init__(
        self,
        file: io.BytesIO,
        buffer_callback: Callable[[PickleBuffer], Any] | None,
        see: Callable[[Any], None],
    ) -> None:
        super().__init__(file, buffer_callback=buffer_callback)
        self._see = see

    def reducer_override(self, obj: Any) -> Any:
        self._see(obj)
        return super().reducer_override(obj)


def by_value(
    value: Any,
    buffer_callback: Callable[[PickleBuffer], Any] | None = None,
    see: Callable[[Any], None] = lambda _: None,
) -> bytes:
    """Pickle `value` with cloudpickle, including lambdas, closures, and definitions of the main script.

    In a process spawned by `multiprocessing` the script's module is called `__mp_main__`, which cloudpickle
    would take for an importable one; so it is registered for pickling by value. Raises whatever the objects
    raise when they are pickled. `buffer_callback` is that of `pickle.dumps`. `see` is called with every
    pickled object that is not of a builtin type.
    """
    main = sys.modules.get("__mp_main__")
    with io.BytesIO() as file, contextlib.ExitStack() as stack:
        if main is not None and main.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(main)
            stack.callback(cloudpickle.unregister_pickle_by_value, main)
        _Pickler(file, buffer_callback, see).dump(value)
        return file.getvalue()


# --- fingerprints ------------------------------------------------------------------------------


def name_of(fn: Any) -> str:
    """Return the module and the qualified name of a function, or of the type of another object."""
    if isinstance(fn, functools.partial):
        return name_of(fn.func)
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
    return digest_of(_parts(fn))


def digest_of(parts: Iterable[str]) -> str:
    """Return a digest of texts in their order, 16 hexadecimal digits."""
    state = xxhash.xxh3_64()
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        state.update(f"{len(encoded)}:".encode() + encoded)
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
        yield name_of(value)
    else:
        yield from _state_parts(value)
        called = vars(type(value)).get("__call__")
        if callable(value) or dataclasses.is_dataclass(value):
            yield from _slot_parts(value)
        if isinstance(called, types.FunctionType):
            yield from _function_parts(called)


def _state_parts(instance: Any) -> Iterator[str]:
    """Yield the type of `instance`, and its plain attributes."""
    yield name_of(type(instance))
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
