"""Pickling the user's objects for processes that import neither their script nor its notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import cloudpickle

__all__ = ["by_value"]


def by_value(value: Any, buffer_callback: Callable[[PickleBuffer], Any] | None = None) -> bytes:
    """`value` pickled with cloudpickle: lambdas, closures, and what the main script defines, go along.

    Also from a process that `multiprocessing` has spawned: there the script's module is called `__mp_main__`, which
    cloudpickle takes for one that can be imported. Raises whatever the objects raise when they are pickled.
    `buffer_callback` is that of `pickle.dumps`.
    """
    main = sys.modules.get("__mp_main__")
    if main is None or main.__name__ in cloudpickle.list_registry_pickle_by_value():
        return bytes(cloudpickle.dumps(value, buffer_callback=buffer_callback))
    cloudpickle.register_pickle_by_value(main)
    try:
        return bytes(cloudpickle.dumps(value, buffer_callback=buffer_callback))
    finally:
        cloudpickle.unregister_pickle_by_value(main)
