"""Libraries that only some sources need: imported when such a source is made, named when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from cachestream.errors import ConfigError

__all__ = ["require"]


def require(module: str, extra: str, what: str) -> Any:
    """The module `module`, which `what` needs and the extra `extra` brings; ConfigError without it."""
    try:
        found: ModuleType = importlib.import_module(module)
    except ImportError as error:
        missing = error.name or module
        raise ConfigError(
            f"{what} needs {module.partition('.')[0]} ({missing} is missing): pip install 'cachestream[{extra}]'"
        ) from error
    return found
