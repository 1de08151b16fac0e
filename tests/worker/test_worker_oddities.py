"""An odd sample, key or error message costs that sample alone, and never the filling."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cachestream as cs
from cachestream import Cache
from cachestream.errors import SourceUnavailableError
from tests.worker.sources import Numbers, Switched
from tests.worker.support import DEADLINE_S, failures_of, only_once, wait_until

LATIN = os.fsdecode(b"\xe9t\xe9.jpg")  # a file's name that is not UTF-8


class OddKeys(Numbers):
    """Numbers whose third unit's samples have keys that are no str."""

    def sample(self, unit: int, sample: int) -> tuple[Any, Any]:
        key, fields = super().sample(unit, sample)
        return (None, 3, b"key", ("a", 1), Path("a"), key)[sample] if unit == 3 else key, fields


class Away(Switched):
    """Numbers whose remote is away at a path that is not UTF-8."""

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        if not os.path.exists(self.switch):
            raise SourceUnavailableError(f"{LATIN}: no answer")
        yield from Numbers.read(self, unit, rng)


def test_a_key_that_is_no_str_costs_its_sample_and_is_named(cache: Cache) -> None:
    source = OddKeys(10, 6)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys() - {f"3/{sample}" for sample in range(5)}
    assert failures_of(cache) == {"sample": 5}
    failures = {row.reason: row.example for row in cache.status().failures}
    assert failures["its key is of type tuple: keys are str"] == "unit 3: ('a', 1)"


def test_a_path_that_is_not_utf8_in_a_key_or_an_error_is_counted_like_any_other(cache: Cache) -> None:
    class Files(Numbers):
        def sample(self, unit: int, sample: int) -> tuple[str, Any]:
            return (LATIN if unit == 3 else f"{unit}"), {"unit": unit}

    def transform(sample: dict[str, int]) -> dict[str, int]:
        if sample["unit"] in (3, 4):
            raise ValueError(f"cannot parse {LATIN}")
        return sample

    with cs.start_worker(cache, Files(10), num_workers=1, transform=transform) as worker:
        assert worker.wait(DEADLINE_S)
    (row,) = cache.status().failures
    assert (row.kind, row.reason, row.count) == ("transform", "ValueError: cannot parse ?t?.jpg", 2)
    assert cache.num_samples == 8


def test_a_remote_that_is_away_at_a_path_that_is_not_utf8_is_waited_for(tmp_path: Path, cache: Cache) -> None:
    source = Away(10, switch=str(tmp_path / "back"))
    with cs.start_worker(cache, source, num_workers=1) as worker:
        wait_until(lambda: "?t?.jpg: no answer" in cache.status().remote_message, "it is named")
        Path(source.switch).touch()
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()


def test_each_sample_of_an_archive_that_cannot_be_used_is_counted(tmp_path: Path, cache: Cache) -> None:
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for number in range(10):
                data = b"seven" if number < 7 else b"7"
                member = tarfile.TarInfo(f"{number}.cls")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    with cs.start_worker(cache, cs.TarSource(tmp_path), num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
        status = worker.status()
    assert cache.num_samples == 6
    assert failures_of(cache) == {"sample": 14}
    assert status.skipped == 14
    assert status.worker is not None
    assert status.worker.totals.failures == 14
