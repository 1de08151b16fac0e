"""From whatever names the data to its source: files, datasets, functions, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from cachestream.errors import SampleError, SourceUnavailableError
from cachestream.sources.datasets import CallableSource
from cachestream.sources.open import open_source
from cachestream.sources.user_code import fingerprint_of
from cachestream.transport import metering

RNG = np.random.default_rng(0)
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(slots=True)
class Slotted:
    size: int

    def __call__(self, rng: np.random.Generator) -> Any:
        return rng.random(self.size)

    def draw(self, rng: np.random.Generator) -> Any:
        return self(rng)


@dataclasses.dataclass(slots=True)
class Further(Slotted):
    __more: int = 4


class Squares:
    """A map-style dataset."""

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 3:
            raise KeyError("three is missing")
        if index == 4:
            raise ConnectionResetError("reset by peer")
        return index, index * index


def draw(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(3)}


def scaled(rng: np.random.Generator, scale: float) -> dict[str, Any]:
    return {"x": rng.random(3) * scale}


# --- choosing ----------------------------------------------------------------------------------


# --- datasets ----------------------------------------------------------------------------------


def test_a_dataset_is_read_by_index_and_its_errors_become_ours() -> None:
    source = pickle.loads(pickle.dumps(open_source(Squares())))
    assert source.num_units == 5
    assert list(source.read(2, RNG)) == [("2", (2, 4))]
    with pytest.raises(SampleError, match=r"Squares\[3\] raised KeyError: 'three is missing'"):
        list(source.read(3, RNG))
    with pytest.raises(SourceUnavailableError, match=r"Squares\[4\] raised ConnectionResetError"):
        list(source.read(4, RNG))


def test_a_datasets_fingerprint_names_its_class_length_and_own_fingerprint() -> None:
    plain = open_source(Squares(5))
    named = Squares(5)
    named.fingerprint = "v2"  # type: ignore[attr-defined]
    assert plain.fingerprint == "dataset:tests.sources.test_open.Squares[5]"
    assert open_source(Squares(6)).fingerprint != plain.fingerprint
    assert open_source(named).fingerprint == plain.fingerprint + ":v2"


@pytest.mark.e2e
def test_who_waits_for_a_slow_call_shows_life() -> None:
    started, finish = threading.Event(), threading.Event()

    def slow(_: np.random.Generator) -> int:
        started.set()
        finish.wait(120)
        return 1

    source = CallableSource(slow)
    beat = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: list(source.read(0, RNG)))
        assert started.wait(60)
        metering.install(lambda _: beat.set())
        try:
            second = pool.submit(lambda: list(source.read(1, RNG)))
            assert beat.wait(60)
            assert not second.done()
        finally:
            metering.install(None)
            finish.set()
        assert first.result(60) == [("0", 1)]
        assert second.result(60) == [("1", 1)]


# --- functions ---------------------------------------------------------------------------------


def test_a_functions_fingerprint_changes_with_its_code_constants_and_bound_values() -> None:
    def windows(size: int, scale: float = 1.0) -> Any:
        return lambda rng: rng.random(size) * scale

    variants = [
        lambda rng: rng.random(3),
        lambda rng: rng.random(4),
        lambda rng: rng.normal(3),
        lambda rng: [rng.random(3) for _ in range(2)],
        lambda rng: [rng.random(3) + 1 for _ in range(2)],
        windows(3),
        windows(4),
        windows(3, 2.0),
        functools.partial(scaled, scale=1),
        functools.partial(scaled, scale=2),
        draw,
        len,
        Squares(5).__getitem__,
        Squares(6).__getitem__,
    ]
    assert len({fingerprint_of(fn) for fn in variants}) == len(variants)
    assert fingerprint_of(windows(3)) == fingerprint_of(windows(3))


def test_a_functions_fingerprint_changes_with_all_that_is_bound_to_it() -> None:
    """Defaults of keywords, attributes in slots and NumPy's numbers as well."""

    def sized(number: Any) -> Any:
        return lambda rng, *, size=number: rng.random(size)

    def closed(value: Any) -> Any:
        return lambda rng: rng.random(value)

    numbers = (np.int64(3), np.int64(4), np.int32(3), np.float32(0.5), np.float64(0.5), np.bool_(True))
    variants = [
        sized(3),
        sized(4),
        sized((3, 4)),
        *map(closed, numbers),
        closed(Slotted(3)),
        closed(Slotted(4)),
        *(
            bound
            for each in (Slotted(3), Slotted(4), Further(3), Further(3, 5))
            for bound in (each, each.draw)
        ),
        Squares(np.int64(5)).__getitem__,  # type: ignore[arg-type]
        Squares(np.int64(6)).__getitem__,  # type: ignore[arg-type]
    ]
    assert len({fingerprint_of(fn) for fn in variants}) == len(variants)
    assert fingerprint_of(Further(3, 5)) == fingerprint_of(Further(3, 5))


def test_a_functions_fingerprint_does_not_change_as_it_is_used() -> None:
    path = Path("a") / "b"
    fn: Any = lambda _: str(path)  # noqa: E731
    before = fingerprint_of(fn)
    assert hash(path)
    assert fn(RNG) == "a/b"
    assert fingerprint_of(fn) == before


SCRIPT = """
import functools, json
from cachestream.sources.user_code import fingerprint_of

WORDS = {"a", "b", "c"}

def sample(rng, words=("x", 2), scale=0.5):
    inner = lambda n: n in {"cat", "dog", "bird", "fish"}
    return [inner(w) for w in words if w not in {"p", "q", "r"}]

class Draw:
    def __call__(self, rng):
        return rng.random()

print(json.dumps([fingerprint_of(f) for f in (sample, Draw(), functools.partial(sample, scale=2))]))
"""


@pytest.mark.e2e
def test_a_fingerprint_is_the_same_in_every_process() -> None:
    found = [
        json.loads(subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env={"PYTHONHASHSEED": seed},
                                  capture_output=True, check=True, timeout=180).stdout)
        for seed in ("1", "2", "3")
    ]  # fmt: skip
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 3


SPAWNING: Final = """
import json, multiprocessing
from cachestream.sources.user_code import fingerprint_of

def sample(rng):
    return rng.random()

class Draw:
    def __call__(self, rng):
        return rng.random()

def tell(pipe):
    pipe.send([fingerprint_of(sample), fingerprint_of(Draw())])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=tell, args=(theirs,))
    process.start()
    print(json.dumps([ours.recv(), [fingerprint_of(sample), fingerprint_of(Draw())]]))
    process.join()
"""


@pytest.mark.e2e
def test_a_function_of_the_main_script_is_the_same_in_a_process_that_it_spawns(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(SPAWNING)
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py"], capture_output=True, check=True, timeout=180
    )
    spawned, here = json.loads(done.stdout)
    assert spawned == here


@pytest.mark.e2e
def test_opening_sources_loads_neither_torch_nor_any_driver() -> None:
    script = (
        "import sys, cachestream.sources.open as o; o.open_source('cachestream');"
        "print([m for m in ('torch', 's3fs', 'aiobotocore', 'botocore', 'aiohttp', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True, timeout=180
    )
    assert done.stdout.strip() == b"[]"


@pytest.mark.e2e
def test_listing_is_done_once_and_not_by_the_children(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.bin").write_bytes(b"1")
    source = open_source(tmp_path)
    (tmp_path / "9.bin").write_bytes(b"1")
    assert pickle.loads(pickle.dumps(source)).num_units == 3
    start = time.process_time()
    for _ in range(1000):
        pickle.loads(pickle.dumps(source))
    assert time.process_time() - start < 2
