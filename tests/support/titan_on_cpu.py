"""torchtitan on a machine without an accelerator: `python titan_on_cpu.py OPTIONS` for `python -m torchtitan.train OPTIONS`.

torchtitan 0.2 takes CUDA where it finds no device. Here it finds the CPU, which answers what is asked of a GPU, and its
kernels for mixtures of experts, which need Triton and which the models of the tests do not have, stay out.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import MagicMock

import torch
import torch._utils

ANSWERS: Final[dict[str, Any]] = {
    "current_device": 0,
    "empty_cache": None,
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 33),
    "memory_stats": {},
    "reset_peak_memory_stats": None,
}

if __name__ == "__main__":
    torch._utils._get_available_device_type = lambda: "cpu"
    for name, answer in ANSWERS.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    sys.modules["torchtitan.models.moe.kernels"] = MagicMock()
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
