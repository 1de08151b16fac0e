"""Sources and transforms for the workers under test. What a sample holds can be told from its key.

Every worker under test loads this module, so it loads little: what one source needs, that source imports.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.errors import SampleError, SourceError, SourceUnavailableError
from cachestream.sources.base import Rows

if TYPE_CHECKING:
    from cachestream import LinesSource


def content(key: str, nbytes: int) -> npt.NDArray[np.uint8]:
    """The bytes that belong to `key`: uint8 `[nbytes]`."""
    seed = xxhash.xxh3_64_intdigest(key.encode())
    return np.random.Generator(np.random.Philox(key=seed)).integers(0, 256, nbytes, np.uint8)


@dataclass(frozen=True)
class FetchedElsewhere:
    """A file that is fetched in a thread pool of an event loop, as libraries with a loop of their own do."""

    path: Path
    num_units: int = 4
    fingerprint: str = "elsewhere"

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, int]]]:
        import asyncio

        from cachestream.transport.remote import Remote
        from cachestream.transport.remote_object import fetch

        data = asyncio.run(asyncio.to_thread(fetch, Remote(str(self.path)), str(self.path)))
        yield str(unit), {"size": len(data)}


@dataclass(frozen=True)
class Numbers:
    """`units` units of `samples` samples of `nbytes` bytes each; the key is "unit/sample"."""

    units: int | None = 100
    samples: int = 1
    nbytes: int = 1000
    pause_s: float = 0.0
    name: str = "numbers"
    journal: str = ""  # a file that gets a byte for every unit read

    @property
    def fingerprint(self) -> str:
        return f"{self.name}:{self.units}x{self.samples}"

    @property
    def num_units(self) -> int | None:
        return self.units

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        if self.journal:
            with open(self.journal, "ab", buffering=0) as file:
                file.write(b"%d\n" % unit)
        if self.pause_s:
            time.sleep(self.pause_s)
        for sample in range(self.samples):
            yield self.sample(unit, sample)

    def sample(self, unit: int, sample: int) -> tuple[str, Any]:
        key = f"{unit}/{sample}"
        return key, {"x": content(key, self.nbytes)}

    def keys(self) -> set[str]:
        return {f"{unit}/{sample}" for unit in range(self.units or 0) for sample in range(self.samples)}


@dataclass(frozen=True)
class Named(Numbers):
    """Numbers whose samples tell their keys."""

    def sample(self, unit: int, sample: int) -> tuple[str, Any]:
        key, fields = super().sample(unit, sample)
        return key, {**fields, "unit": unit, "number": sample}


@dataclass(frozen=True)
class InRows(Numbers):
    """Numbers in tables of ten; the remote goes away once in each unit, after its first table."""

    folder: str = ""  # holds a file for each unit that was cut off

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        samples = [self.sample(unit, number) for number in range(self.samples)]
        yield samples[0]
        for start in range(1, self.samples, 10):
            part = samples[start : start + 10]
            yield Rows([key for key, _ in part], {"x": np.stack([sample["x"] for _, sample in part])})
            if start == 1 and not os.path.exists(mark := os.path.join(self.folder, str(unit))):
                with open(mark, "x"):
                    raise SourceUnavailableError("away for a moment")
            if self.pause_s:
                time.sleep(self.pause_s)


@dataclass(frozen=True)
class Faulty(Numbers):
    """Numbers, some units of which `misbehave` as the kinds in `faults` say."""

    faults: tuple[tuple[int, str], ...] = ()

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        for key, sample in super().read(unit, rng):
            yield key, misbehave(dict(self.faults).get(unit, ""), sample)


@dataclass(frozen=True)
class Ragged(Numbers):
    """Samples of 1 to 5 rows; every tenth unit has another dtype, and fits nowhere."""

    def sample(self, unit: int, sample: int) -> tuple[str, Any]:
        key, _ = super().sample(unit, sample)
        dtype = np.float64 if unit % 10 == 9 else np.float32
        return key, {"rows": np.full((unit % 5 + 1, 3), unit, dtype), "name": f"unit {unit}"}


@dataclass(frozen=True)
class Switched(Numbers):
    """Numbers whose remote answers as the file at `switch` says: "ok", "away", "refused" or "no sample"."""

    switch: str = ""

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        state = Path(self.switch).read_text(encoding="utf-8")
        for index, (key, sample) in enumerate(super().read(unit, rng)):
            if index == self.samples // 2:
                if state == "away":
                    raise SourceUnavailableError("the remote does not answer")
                if state == "refused":
                    raise SourceError("no such bucket")
                if state == "no sample":
                    raise SampleError(f"unit {unit} is torn")
            yield key, sample


@dataclass(frozen=True)
class Mute(Numbers):
    """Numbers; units that the file at `switch` names do not answer after half their samples, or nothing does ("all")."""

    switch: str = ""

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        mute = Path(self.switch).read_text(encoding="utf-8").split()
        for index, (key, sample) in enumerate(super().read(unit, rng)):
            if "all" in mute or (index == self.samples // 2 and str(unit) in mute):
                raise SourceUnavailableError(f"s3://bucket/{unit}: 503 Slow Down")
            yield key, sample


@dataclass(frozen=True)
class Gated:
    """Files of lines, of which the later ones are read only when a file exists."""

    lines: LinesSource
    path: str

    @property
    def fingerprint(self) -> str:
        return self.lines.fingerprint

    @property
    def num_units(self) -> int:
        return self.lines.num_units

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        while unit and not os.path.exists(self.path):
            time.sleep(0.05)
        yield from self.lines.read(unit, rng)


@dataclass(frozen=True)
class LateFloats(Numbers):
    """40 units of integers, and after them units of floats, which come when the file `gate` exists."""

    gate: str = ""

    def sample(self, unit: int, sample: int) -> tuple[str, Any]:
        while unit >= 40 and self.gate and not os.path.exists(self.gate):
            time.sleep(0.05)
        return f"{unit}/{sample}", {"score": unit if unit < 40 else unit + 0.5, "y": np.ones(999)}

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        for key, sample in self.read(unit, rng):
            yield Rows([key], {name: np.array([value]) for name, value in sample.items()})

    @property
    def scores(self) -> list[float]:
        return [self.sample(unit, 0)[1]["score"] for unit in range(self.units or 0)]


@dataclass(frozen=True)
class Mixed(Numbers):
    """Samples of which one in three is another, the first one among them."""

    def sample(self, unit: int, sample: int) -> tuple[str, Any]:
        return f"{unit}/{sample}", {"text": "about"} if unit % 3 == 0 else {"number": unit}

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        for key, sample in self.read(unit, rng):
            yield Rows([key], {"number": np.array([unit])}) if unit % 3 else (key, sample)


@dataclass(frozen=True)
class Scores(Numbers):
    """Numbers as JSON has them: every second one is whole."""

    def sample(self, unit: int, sample: int) -> tuple[str, Any]:
        return f"{unit}/{sample}", {"score": unit if unit % 2 == 0 else unit + 0.5, "x": [1, 2]}

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        for key, sample in self.read(unit, rng):
            yield Rows([key], {"score": np.array([sample["score"]]), "x": np.array([sample["x"]])})


@dataclass(frozen=True)
class TwoLarge(Numbers):
    """Numbers, of which one is larger than a shard, and one larger than the limit."""

    def sample(self, unit: int, sample: int) -> tuple[str, dict[str, object]]:
        key = f"{unit}/{sample}"
        nbytes = {"20/1": 1_600_000, "30/0": 8_000_000}.get(key, self.nbytes)
        return key, {"data": content(key, nbytes).tobytes()}

    def read_rows(self, unit: int, rng: np.random.Generator) -> Iterator[Rows | tuple[str, Any]]:
        keys, samples = zip(*self.read(unit, rng), strict=True)
        yield Rows(keys, {"data": [sample["data"] for sample in samples]})


@dataclass(frozen=True)
class Documents(Numbers):
    """Documents of 20 to 99 bytes, the tokens."""

    def sample(self, unit: int, sample: int) -> tuple[str, Any]:
        key, found = super().sample(unit, sample)
        return key, {"x": found["x"][: 20 + int(found["x"][0]) % 80]}


@dataclass(frozen=True)
class Drawn:
    """A sampler that draws `units` units in an order that is another each time."""

    units: int

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng().permutation(self.units).tolist())


def misbehave(kind: str, sample: Any) -> Any:
    """Do to this process what a transform or a source may do, by name; "" does nothing."""
    if kind in ("raise", "cancelled"):
        raise _error(kind)
    if kind == "nonsense":
        return {"x": object()}
    if kind == "none":
        return None
    if kind == "sys.exit":
        sys.exit(3)
    if kind.startswith("os._exit"):
        os._exit(int(kind.removeprefix("os._exit")))
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "loop":
        while True:
            time.sleep(0.01)
    if kind == "memory":
        _eat_memory()
    return sample


def _error(kind: str) -> BaseException:
    import asyncio

    return {"raise": ValueError("this sample is bad"), "cancelled": asyncio.CancelledError()}[kind]


def _eat_memory() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**33, before[1]))
    try:
        np.ones(2**40, np.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
