"""The recipes for clusters: their scripts and manifests are valid, and name commands and options that exist."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import typer
import yaml
from PIL import Image

from cachestream.cli.app import app
from cachestream.config import parse_size
from tests.support.interpreters import QUICK

ROOT: Final = Path(__file__).parents[2]
COOKBOOK: Final = ROOT / "docs" / "cookbook"
AGAIN: Final = 85
# `srun` with two ranks on this machine, and `scontrol` that notes what it is asked for.
SRUN: Final = """#!/bin/bash
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & done
status=0
for job in $(jobs -p); do wait $job || status=$?; done
exit $status
"""
SCONTROL: Final = '#!/bin/bash\necho "$@" >> asked\n'


def blocks(page: str, language: str) -> list[str]:
    text = (COOKBOOK / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def values(node: Any, key: str) -> Iterator[Any]:
    """Every value of `key`, at any depth."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    if isinstance(node, dict) and key in node:
        yield node[key]
    for child in children:
        yield from values(child, key)


MANIFESTS: Final[list[Any]] = [yaml.safe_load(text) for text in blocks("kubernetes.md", "yaml")]
COMMANDS: Final = [
    *(
        command
        for manifest in MANIFESTS
        for command in values(manifest, "command")
        if isinstance(command, list)
    ),
    *(
        line.split()
        for line in re.findall(r"`(cachestream [^`]+ [^`]+)`", (COOKBOOK / "jobs.md").read_text("utf-8"))
    ),
]


@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command[0] == "cachestream"], ids=" ".join
)
def test_a_command_of_a_recipe_is_one_that_the_command_line_takes(command: list[str]) -> None:
    _, name, *arguments = command
    group = typer.main.get_command(app)
    found = group.get_command(typer.Context(group), name)  # type: ignore[attr-defined]
    with found.make_context(name, list(arguments)) as context:  # fails for an unknown option or a wrong value
        assert context.params["cache"] in arguments


def test_the_volume_of_a_pod_is_larger_than_the_limit_of_its_cache() -> None:
    pod, _ = MANIFESTS
    (volume,) = values(pod, "sizeLimit")
    (fill,) = values(pod, "initContainers")
    limit = fill[0]["command"][fill[0]["command"].index("--size-limit") + 1]
    assert parse_size(volume + "B") >= 1.1 * parse_size(limit)
    assert fill[0]["resources"]["requests"]["ephemeral-storage"] == volume
    assert fill[0]["restartPolicy"] == "Always"
    (grace_s,) = values(pod, "terminationGracePeriodSeconds")
    assert grace_s > 30  # the default


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: str(manifest["kind"]))
def test_what_a_container_mounts_is_a_volume_of_its_pod(manifest: Any) -> None:
    mounted = {mount["name"] for mounts in values(manifest, "volumeMounts") for mount in mounts}
    (volumes,) = values(manifest, "volumes")
    assert mounted == {volume["name"] for volume in volumes}


@pytest.mark.parametrize(
    ("page", "example"),
    [
        ("lightning.md", "lightning_ddp"),
        ("huggingface.md", "accelerate_loop"),
        ("huggingface.md", "hf_trainer"),
        ("torchtitan.md", "torchtitan_tokens"),
        ("ray.md", "ray_train"),
        ("ray.md", "mp_spawn"),
    ],
)
def test_the_page_of_a_framework_leads_to_an_example_that_the_tests_run(page: str, example: str) -> None:
    assert f"](../../examples/{example}.py)" in (COOKBOOK / page).read_text(encoding="utf-8")
    tests = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "examples").glob("test_*.py")]
    ways = (f'run("{example}", ', f'EXAMPLE: Final = "{example}"', f'EXAMPLES / "{example}.py"')
    assert any(way in text for text in tests for way in ways)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for label in ("dark", "bright"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(96):
            pixels = rng.integers(0, 120, (36, 36, 3), dtype=np.uint8) + np.uint8(120 * (label == "bright"))
            Image.fromarray(pixels).save(tmp_path / "images" / label / f"{i:03d}.png")
    return tmp_path / "images"


def processes_of(job: str) -> list[int]:
    """All processes of a job, as SLURM finds them by its control group: those that have its number."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURM_JOB_ID={job}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.mark.e2e
def test_the_script_for_slurm_goes_back_into_the_queue_and_on_from_its_checkpoint(
    images: Path, tmp_path: Path
) -> None:
    """`srun` and `scontrol` are stand-ins; the signal goes to all processes of the step, the workers too."""
    (script,) = blocks("jobs.md", "bash")
    (tmp_path / "job.sh").write_text(script, encoding="utf-8")
    for name, text in (
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("python", f'#!/bin/bash\nexec {sys.executable} "$@"\n'),
    ):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, check=True)
    job = str(os.getpid())
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": QUICK,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "SLURM_JOB_ID": job,
        "SLURM_NTASKS": "2",
        "REMOTE": str(images),
        "SCRATCH": str(tmp_path / "scratch"),
        "CHECKPOINT": str(tmp_path / "run.pt"),
        "SIZE_LIMIT": "50MB",
    }

    def start(epochs: int) -> subprocess.Popen[str]:
        environment["EPOCHS"] = str(epochs)
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment, **output)  # type: ignore[call-overload,no-any-return]

    first = start(100_000)
    assert first.stdout is not None
    for line in first.stdout:
        if re.match(r"epoch \d", line):
            break
    for pid in processes_of(job):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text().strip() not in ("bash", "srun"):
                os.kill(pid, signal.SIGTERM)
    printed, _ = first.communicate(timeout=120)
    assert first.returncode == AGAIN, printed
    assert (tmp_path / "asked").read_text() == f"requeue {job}\n"
    interrupted = re.findall(r"epoch (\d+): interrupted after (\d+) steps", printed)  # two may share a line
    assert len(interrupted) == 2
    assert len(set(interrupted)) == 1  # both ranks after the same step
    epoch = interrupted[0][0]

    second = start(int(epoch) + 2)
    printed, _ = second.communicate(timeout=240)
    assert second.returncode == 0, printed
    assert re.findall(r"^epoch (\d+): \d+ samples", printed, re.MULTILINE)[0] == epoch
    deadline = time.monotonic() + 20
    while processes_of(job) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(job)
