"""Pickling the user's objects for processes that import neither their script nor its notebook."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import cloudpickle

__all__ = ["by_value"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Shows `see` every object on the way that pickle does not know by itself."""

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
    """`value` pickled with cloudpickle: lambdas, closures, and what the main script defines, go along.

    Also from a process that `multiprocessing` has spawned: there the script's module is called `__mp_main__`, which
    cloudpickle takes for one that can be imported. Raises whatever the objects raise when they are pickled.
    `buffer_callback` is that of `pickle.dumps`. `see` is called with all objects that are no plain values.
    """
    main = sys.modules.get("__mp_main__")
    if main is None or main.__name__ in cloudpickle.list_registry_pickle_by_value():
        return _dumps(value, buffer_callback, see)
    cloudpickle.register_pickle_by_value(main)
    try:
        return _dumps(value, buffer_callback, see)
    finally:
        cloudpickle.unregister_pickle_by_value(main)


def _dumps(
    value: Any, buffer_callback: Callable[[PickleBuffer], Any] | None, see: Callable[[Any], None]
) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file, buffer_callback, see).dump(value)
        return file.getvalue()
