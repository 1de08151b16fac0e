"""torchtitan on a machine without an accelerator: `main` for a torchrun of two ranks that run `torchtitan.train`.

Both are forked from a process that has loaded torchtitan, which takes each of them seconds else. torchtitan 0.2 takes CUDA where it finds no device. Here it finds the CPU, which answers what is asked of a GPU, and its
kernels for mixtures of experts, which need Triton and which the models of the tests do not have, stay out.
"""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import sys
import traceback
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

import torch
import torch._utils

from tests.training.scripts.ports import free_port

__all__ = ["main"]

ANSWERS: Final[dict[str, Any]] = {
    "current_device": 0,
    "empty_cache": None,
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 33),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
}

RANKS: Final = 2


def main() -> None:
    """Train with the options on the command line; ends with 1 if a rank fails, and then ends the other one too."""
    torch.set_num_threads(1)
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, answer in ANSWERS.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    importlib.import_module("torchtitan.train")
    os.environ |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pids = {_fork(rank) for rank in range(RANKS)}
    failed = False
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if status and not failed:
            failed = True
            for other in pids:
                os.kill(other, signal.SIGTERM)
    sys.exit(failed)


def _fork(rank: int) -> int:
    """Start a rank; returns its process id. Only the first one is heard."""
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    if rank:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    code = 0
    try:
        runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
    except BaseException:  # noqa: BLE001  a process's main
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
