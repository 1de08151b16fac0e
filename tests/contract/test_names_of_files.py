"""The files that a source has, by their names: ranges with both ends, folders with what is below, nothing hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import cachestream as cs
from tests.contract.servers import Answer, serve

NAMES = ["a.txt", "b/c.txt", "b/d/e.txt", ".hidden.txt", ".git/f.txt", "b/.g.txt"]


def keys_of(source: Any) -> list[str]:
    """The keys of all samples, sorted."""
    rng = np.random.default_rng(0)
    return sorted(key for unit in range(source.num_units) for key, _ in source.read(unit, rng))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{2..0}", ["0", "1", "2"]),
        ("{0..6..3}", ["0", "3", "6"]),
        ("{one,two}-{1..2}", ["one-1", "one-2", "two-1", "two-2"]),
    ],
)
def test_a_range_has_both_of_its_ends(pattern: str, expected: list[str]) -> None:
    with serve(lambda *_: Answer(200, b"x", {"Content-Length": "1"})) as server:
        source = cs.open_source(f"{server}/{pattern}.txt")
        assert [key.rpartition("/")[2] for key in keys_of(source)] == [f"{name}.txt" for name in expected]


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_a_folder_has_what_is_below_it_and_nothing_hidden(scheme: str, tmp_path: Path) -> None:
    root = f"{scheme}{tmp_path}/set"
    for name in NAMES:
        with fsspec.open(f"{root}/{name}", "w", auto_mkdir=True) as file:
            file.write(name)
    assert keys_of(cs.open_source(root)) == ["a.txt", "b/c.txt", "b/d/e.txt"]
    assert keys_of(cs.open_source(root, recursive=False)) == ["a.txt"]
    assert keys_of(cs.open_source(f"{root}/*.txt")) == ["a.txt"]
    assert keys_of(cs.open_source(f"{root}/**/*.txt")) == ["a.txt", "b/c.txt", "b/d/e.txt"]
    assert keys_of(cs.open_source(f"{root}/.git")) == ["f.txt"]
