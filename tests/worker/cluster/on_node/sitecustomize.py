# ruff: noqa: INP001  a folder on the path, not a package
"""Connects a driver to the node RAY_TEST_NODE of a cluster on one machine, where Ray would take the head.

A folder with this file on PYTHONPATH does that, to all Pythons started from then on.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

NODE = os.environ.get("RAY_TEST_NODE")
MODULE = "ray._private.services"


class _Finder:
    """Changes the module that tells the nodes of this machine, as it is imported."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(_Finder)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module.find_node_ids = lambda: {NODE}

        loader.exec_module = exec_module
        return spec


if NODE:
    sys.meta_path.insert(0, _Finder)
