"""Modules that take long to load, for the tests that use them: loaded there, and not by each process that collects."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Later"]


class Later:
    """Stands for the module `name`, which is loaded when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # asked for by who looks for tests in a module
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
