# ruff: noqa: INP001  a folder on the path, not a package
"""Connects a driver to the node RAY_TEST_NODE of a cluster on one machine, where Ray would take the head.

"here" is the node in the network namespace of the driver. A folder with this file on PYTHONPATH does that, to
all Pythons started from then on.
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
            module.find_node_ids = _nodes_here if NODE == "here" else lambda: {NODE}

        loader.exec_module = exec_module
        return spec


def _nodes_here() -> set[str]:
    """The nodes whose raylets run in the network namespace of this process."""
    found, here = set(), os.readlink("/proc/self/ns/net")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf-8") as file:
                flags = file.read().split("\0")
            if flags[0].endswith("/raylet") and os.readlink(f"/proc/{pid}/ns/net") == here:
                found |= {flag.partition("=")[2] for flag in flags if flag.startswith("--node_id=")}
        except OSError:  # it has ended
            pass
    return found


if NODE:
    sys.meta_path.insert(0, _Finder)
