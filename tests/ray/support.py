"""A Ray cluster for tests, sources and transforms that actors import, and the samples of a cache."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import cachestream as cs
from cachestream import Cache
from cachestream.schema import Schema
from cachestream.sources.base import Rows
from cachestream.worker.sampling.encode import to_record
from tests.worker.sources import Named, misbehave

Sample = tuple[Schema, tuple[bytes, ...]]


def samples_of(cache: Cache) -> dict[str, Sample]:
    """The fields of each cached sample, by key; fails if a key is there twice."""
    found: dict[str, Sample] = {}
    if not cache.num_samples:
        return found
    source, rng = cs.CacheSource(cache.path), np.random.default_rng(0)
    for unit in range(source.num_units):
        for key, sample in source.read(unit, rng):
            assert key not in found
            record = to_record(sample, key)
            found[key] = record.schema, tuple(bytes(column[0]) for column in record.columns)
    return found


@dataclass(frozen=True)
class Tables(Named):
    """Named samples, with a str, in tables of seven."""

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        samples = [self.sample(unit, number) for number in range(self.samples)]
        for start in range(0, self.samples, 7):
            part = samples[start : start + 7]
            fields: dict[str, Any] = {"x": np.stack([sample["x"] for _, sample in part])}
            fields["name"] = [f"{key} of {'many' * (unit % 3)}" for key, _ in part]
            yield Rows([key for key, _ in part], fields)


def with_noise(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {
        "noise": rng.normal(size=5),
        "name": f"unit {sample['unit']}",
        "crop": sample["x"][: sample["unit"] % 5 + 1],
    }


def with_faults(sample: Mapping[str, Any]) -> Any:
    """Some samples are dropped, some fail, in each way once in a hundred units."""
    faults = {10: "raise", 20: "sys.exit", 40: "nonsense", 60: "none", 85: "cancelled"}
    return misbehave(faults.get(int(sample["unit"]) % 100, ""), sample)


def in_windows(sample: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """None to four windows of a sample, of different lengths."""
    for number in range(int(sample["unit"]) % 5):
        yield {"window": sample["x"][: number + 1], "number": number}


def with_reading_threads(_: Any) -> dict[str, int]:
    """The number of threads that read units in this process."""
    return {"threads": sum(thread.name.startswith("fetch-") for thread in threading.enumerate())}


def with_killer(sample: Mapping[str, Any]) -> Any:
    return misbehave("os._exit1" if sample["unit"] == 13 else "", sample)


def with_hanging(sample: Mapping[str, Any]) -> Any:
    return misbehave("loop" if sample["unit"] == 7 else "", sample)


def slow_in_one_process(sample: Mapping[str, Any], mark: str, pause_s: float, factor: float) -> Any:
    """Take `pause_s`, and `factor` times as long in the process that came first."""
    try:
        with open(mark, "x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        pass
    with open(mark, encoding="utf-8") as file:
        is_slow = file.read() == str(os.getpid())
    time.sleep(pause_s * (factor if is_slow else 1.0))
    return sample
