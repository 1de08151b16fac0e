"""Make `tests/baseline/files`, what version 0.1.0 left behind, for later versions to open.

    python -m tests.baseline.make

A cache of 96 samples (shards, catalogue, stored listing), a checkpoint in mid-epoch with the samples that follow it,
the manifest of an epoch with its samples, and the answers of commands with `--json`. Run it on that version only: a
baseline made by the code that it is to hold says nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np

import cachestream as cs

FILES: Final = Path(__file__).parent / "files"
# A fixed place, because the fingerprint of a source holds its path.
REMOTE: Final = Path("/tmp/cachestream-baseline")
SAMPLES: Final = 96
BATCHES_DONE: Final = 5
LOADER: Final[dict[str, Any]] = {"batch_size": 8, "seed": 7, "min_samples": SAMPLES}


def make_remote() -> None:
    """Write the 96 arrays that the baseline was sampled from."""
    for index in range(SAMPLES):
        path = REMOTE / f"part{index % 3}" / f"{index:03}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.full(256, index, np.int16))


def start(cache: cs.Cache) -> cs.Worker:
    """Start the worker that filled the baseline."""
    return cs.start_worker(cache, cs.open_source(str(REMOTE)), num_workers=1, seed=3, shard_size="12kB")


def samples_of(batch: Any) -> list[int]:
    """The numbers of a batch's samples."""
    return [int(value) for value in batch["array"][:, 0]]


def main() -> None:
    make_remote()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "cache")
        cache = cs.Cache(root, size_limit="20MB")
        with start(cache) as worker:
            worker.wait(timeout_s=60)
        with cs.EpochLoader(cache, record=FILES / "manifests", **LOADER) as loader:
            epoch = [samples_of(batch) for batch in loader]
        with cs.EpochLoader(cache, **LOADER) as loader:
            batches = iter(loader)
            for _ in range(BATCHES_DONE):
                next(batches)
            state = loader.state_dict()
            rest = [samples_of(batch) for batch in batches]
        (FILES / "state.json").write_text(json.dumps({"state": state, "rest": rest, "epoch": epoch}))
        for command in ("status", "verify"):
            asked = [sys.executable, "-m", "cachestream", command, str(root), "--json"]
            answer = subprocess.run(asked, capture_output=True, text=True, check=True)
            (FILES / f"{command}.json").write_text(answer.stdout.replace(folder, "FOLDER"))
        cache.close()
        kept = shutil.ignore_patterns("board", "history", "*.lock", "*.lease", "log.txt", "*-journal")
        shutil.copytree(root, FILES / "cache", ignore=kept)


if __name__ == "__main__":
    main()
