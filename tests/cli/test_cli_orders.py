"""Shares, curricula and manifests from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cachestream import Cache
from tests.cli.test_cli import cli, done, refused
from tests.worker.support import keys_of

pytestmark = pytest.mark.usefixtures("forked")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(20):
        np.save(folder / f"{number:02d}.npy", np.full(3, number))
    (folder / "list.csv").write_text("path,label\n" + "".join(f"{n:02d}.npy,{n % 2}\n" for n in range(10)))
    return folder


def keys_in(path: Path) -> list[str]:
    with Cache(path) as cache:
        return sorted(keys_of(cache))


def test_two_nodes_fetch_a_share_each(data: Path, tmp_path: Path) -> None:
    names = []
    for node in range(2):
        done(cli("worker", f"{data}/*.npy", tmp_path / f"{node}", "--workers", 1, "--partition", f"{node}/2"))
        names += keys_in(tmp_path / f"{node}")
    assert sorted(names) == [f"{number:02d}.npy" for number in range(20)]
    message = refused(cli("worker", f"{data}/*.npy", tmp_path / "x", "--partition", "2/2"), 2)
    assert "node i of n, counted from 0" in message


def test_a_curriculum_and_a_manifest_are_named_on_the_command_line(data: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.py").write_text("def easy(progress):\n    return range(10, 0, -1)\n", encoding="utf-8")
    cache = tmp_path / "cache"
    arguments = ["worker", data / "list.csv", cache, "--workers", 1, "--order", "plan:easy"]
    done(cli(*arguments, "--source-option", "manifest.label=label", cwd=tmp_path))
    assert keys_in(cache) == [f"{number:02d}.npy" for number in range(10)]
    status = json.loads(done(cli("status", cache, "--json")))
    assert status["num_samples"] == 10
    with Cache(cache) as filled, filled.snapshot() as dataset:
        found = sorted((int(dataset[i]["array"][0]), int(dataset[i]["label"])) for i in range(len(dataset)))
    assert found == [(number, number % 2) for number in range(10)]
