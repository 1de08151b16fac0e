"""The caches of the training side's tests, here too."""

from __future__ import annotations

from tests.training.conftest import NewCache, new_cache

__all__ = ["NewCache", "new_cache"]
