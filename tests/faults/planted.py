"""Faults to plant in a copy of the package, each of them one broken promise, and the test that must find it.

A fault is a replacement of one piece of code, wherever in the package that stands: it survives the renaming of a
module, but not of the code itself. `make test` holds that each can be planted, `make soak` that each is found.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["FAULTS", "Fault", "copy_project", "plant"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A promise, the code that keeps it (a regular expression), and the code that breaks it.

    `found_by`: the test that fails under the fault, with one of its parameters at least.
    """

    breaks: str
    code: str
    broken: str
    found_by: str

    @property
    def name(self) -> str:
        return self.breaks.replace(" ", "-")


FAULTS: Final = (
    Fault(
        "the limit is not exceeded by a byte",
        r"return self\.limit_bytes - self\.used_bytes\b",
        "return self.limit_bytes - self.used_bytes + 1",
        "tests/storage/test_reservations.py::test_the_last_free_byte_is_given_and_none_beyond_it",
    ),
    Fault(
        "an epoch leases all its shards",
        r"leases\.create\(ranges_of\(cached\.ids, chosen\)\)",
        "leases.create(ranges_of(cached.ids, chosen)[:-1])",
        "tests/storage/test_leases.py::test_leased_shards_stay_and_the_others_go",
    ),
    Fault(
        "a shard and the progress of its units are one transaction",
        r"(self\._enter\(tables, .*), progress\)\n",
        r"\1, UnitProgress(progress.pass_id))\n            if is_wanted:\n                self.commit(progress)\n",
        "tests/storage/test_crash_points.py::test_publishing",
    ),
    Fault(
        "what no epoch has used is not evicted",
        r"used_only=spare_unused\b",
        "used_only=False",
        "tests/storage/test_eviction.py::test_a_shard_that_no_epoch_has_used_is_no_victim",
    ),
    Fault(
        "a resume begins with the next batch",
        r"batches, request = done - self\.request\.done, self\.request",
        "batches, request = done - 1 - self.request.done, self.request",
        "tests/training/test_checkpoint.py::test_from_any_step_of_an_epoch_the_rest_is_the_same_in_a_new_loader",
    ),
    Fault(
        "damaged columns do not pass for whole ones",
        r"!= self\.checksums\.get\(name\)",
        "is None",
        "tests/storage/test_shard.py::test_every_single_flipped_bit_is_detected",
    ),
    Fault(
        "every call to a server has a deadline",
        r"deadline_s = timeout_s \+ (?P<since>\(time\.monotonic\(\) if since_s is None else since_s\))",
        r"deadline_s = timeout_s + 3600 + \g<since>",
        "tests/transport/test_deadlines.py::test_a_server_that_keeps_one_waiting_is_given_up",
    ),
    Fault(
        "all ranks make the same steps",
        r"answers = (?P<said>ranks\.agree\(self\._rounds\(request\)\[0\], mine\))",
        r"answers = [mine for _ in \g<said>]",
        "tests/training/test_ranks.py::test_all_ranks_make_the_same_steps_and_no_sample_comes_twice",
    ),
    Fault(
        "no error shows a secret",
        r"redact_text\((f\"\{type\(error\)\.__name__\}: \{error\}\"), secrets\)\[:500\]",
        r"\1[:500]",
        "tests/transport/test_remote_errors.py::test_the_original_error_is_not_shown_beside_ours",
    ),
    Fault(
        "transforms draw from seeded generators",
        r"torch\.Generator\(device\)\.manual_seed\(seed\)",
        "torch.Generator(device)",
        "tests/training/batches/test_batch_transforms.py::test_runs_draw_the_same_each_batch_its_own_and_so_does_the_trainer",
    ),
    Fault(
        "a worker that was killed is replaced",
        r"if lost_worker\(directory\) is not None:\n +self\._replace\(\)",
        "if lost_worker(directory) is not None:",
        "tests/worker/test_worker_recovery.py::test_a_killed_supervisor_is_replaced_by_the_process_that_needs_it_while_it_fills_and_while_it_rests",
    ),
    Fault(
        "a full cache turns over",
        r"if wanted <= 0 or filling\.length == 0:",
        "if wanted > 0 or filling.length == 0:",
        "tests/storage/test_snapshots.py::test_a_share_is_left_out_only_where_the_filling_needs_it",
    ),
)


def copy_project(root: Path, folder: Path) -> None:
    """Copy from `root` what its tests run with into `folder`."""
    nothing_made = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("cachestream", "tests"):
        shutil.copytree(root / name, folder / name, ignore=nothing_made)
    shutil.copy(root / "pyproject.toml", folder)


def plant(package: Path, fault: Fault) -> Path:
    """Plant `fault` below `package`; returns the file. Raises ValueError if its code is not in exactly one place."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    places = [path for path, text in texts.items() for _ in re.finditer(fault.code, text)]
    if len(places) != 1:
        raise ValueError(f"{fault.breaks}: {fault.code!r} stands in {[str(path) for path in places]}")
    (path,) = places
    path.write_text(re.sub(fault.code, fault.broken, texts[path]), encoding="utf-8")
    return path
