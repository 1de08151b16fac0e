"""`start_worker`: each option makes a difference, what cannot work is refused, and functions of any script are taken."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import xxhash

import cachestream as cs
from tests.contract.readers import (
    DEADLINE_S,
    FOUR,
    Listed,
    Told,
    hangs,
    numbers_in,
    python,
    several,
    until,
    with_draws,
)
from tests.contract.servers import Answer, answer_with, serve

LEVELS: Final = np.arange(60) % 10
SAMPLER: Final = [*range(59, 29, -1), *range(40, 50)]


# Each fills a cache of its own with one process that reads one unit at a time, all of them at the same time.
FILLS: Final[dict[str, dict[str, Any]]] = {
    "hanging": {"transform": hangs, "hang_timeout_s": 3.0},
    "sequential": {"order": "sequential", "transform": several, "shard_size": "1MB"},
    "shuffle": {"seed": 5, "transform": with_draws},
    "shuffle again": {"seed": 5, "transform": with_draws},
    "another seed": {"seed": 6, "transform": with_draws},
    "weights": {"order": [0.0, 1.0, 9.0] * 20},
    "curriculum": {"order": lambda progress: 10 * progress + 1 >= LEVELS, "holdout": 0.25},
    "sampler": {"order": Listed(SAMPLER)},
    "share 0": {"partition": (0, 2)},
    "share 1": {"partition": "1/2", "seed": 3, "order": "sequential"},
}


@dataclass(frozen=True)
class Filled:
    """What a worker has left: the samples, the units in the order in which they were read, the sizes of shards."""

    samples: dict[str, Any]
    units: list[int]
    sizes: list[int]
    at_once: int
    status: Any

    @property
    def numbers(self) -> list[int]:
        return sorted(self.samples["number"].tolist())

    @property
    def draws(self) -> dict[int, float]:
        return dict(zip(self.samples["number"].tolist(), self.samples["draw"].tolist(), strict=True))


@pytest.fixture(scope="module")
def fills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Filled]:
    """The caches of `FILLS`."""
    found = {}
    with ExitStack() as stack:
        running = []
        for name, options in FILLS.items():
            folder = tmp_path_factory.mktemp("fill")
            source = Told(str(folder))
            cache = stack.enter_context(cs.Cache(folder / "cache", "4MB", min_free=0))
            given: dict[str, Any] = {"num_workers": 1, "concurrency": 1, "shard_size": FOUR} | options
            worker = stack.enter_context(cs.start_worker(cache, source, **given))
            running.append((name, source, cache, worker))
        for name, source, cache, worker in running:
            assert worker.wait(DEADLINE_S)
            with cache.snapshot() as dataset:
                samples = dataset[:]
            sizes = [path.stat().st_size for path in Path(cache.path, "shards").rglob("*.safetensors")]
            found[name] = Filled(samples, source.units_read, sizes, source.most_at_once, cache.status())
    return found


def test_the_order_is_that_of_the_source_or_of_the_seed(fills: dict[str, Filled]) -> None:
    assert fills["sequential"].units == list(range(60))
    shuffled = fills["shuffle"].units
    assert sorted(shuffled) == list(range(60))
    assert shuffled != list(range(60))
    assert fills["shuffle again"].units == shuffled
    assert sorted(fills["another seed"].units) == list(range(60))
    assert fills["another seed"].units != shuffled


def test_weights_draw_units_as_often_as_they_say_and_as_many_as_there_are(fills: dict[str, Filled]) -> None:
    drawn = Counter(number % 3 for number in fills["weights"].numbers)
    assert drawn.total() == 60
    assert drawn[0] == 0
    assert drawn[2] > 2 * drawn[1], "nine to one"


def test_a_torch_sampler_says_which_units_come_repeats_included(fills: dict[str, Filled]) -> None:
    assert fills["sampler"].units == SAMPLER
    assert fills["sampler"].numbers == sorted(SAMPLER)


def test_a_curriculum_brings_every_unit_once_the_easy_ones_first(fills: dict[str, Filled]) -> None:
    units = fills["curriculum"].units
    assert sorted(units) == list(range(60))
    assert all(LEVELS[unit] <= 10 * (place + 1) / 60 + 1 for place, unit in enumerate(units))


def test_a_transform_may_drop_a_sample_make_several_of_it_and_draw(fills: dict[str, Filled]) -> None:
    samples = fills["sequential"].samples
    kept = [number for number in range(60) if number % 3]
    assert fills["sequential"].numbers == sorted([*kept, *kept])
    halves = sorted((samples["x"][:, 0] - samples["number"]).tolist())
    assert halves == [0.0] * 40 + [0.5] * 40
    draws = fills["shuffle"].draws
    assert len(set(draws.values())) == 60
    assert fills["shuffle again"].draws == draws
    assert not set(fills["another seed"].draws.values()) & set(draws.values())


def test_a_shard_is_full_at_its_size(fills: dict[str, Filled]) -> None:
    assert len(fills["weights"].sizes) == 15
    assert max(fills["weights"].sizes) < 16_000 + 4 * 1100, "four samples and a header"
    assert max(fills["sequential"].sizes) > 6 * 4096, "more than one of 16 kB has"


def test_the_shares_of_nodes_are_disjoint_and_complete_whatever_order_and_seed(
    fills: dict[str, Filled],
) -> None:
    shares = [fills["share 0"].numbers, fills["share 1"].numbers]
    assert [len(share) for share in shares] == [30, 30]
    assert sorted([*shares[0], *shares[1]]) == list(range(60))


def test_a_sample_that_hangs_is_left_out_after_its_time_and_the_others_come(fills: dict[str, Filled]) -> None:
    assert fills["hanging"].numbers == [number for number in range(60) if number != 30]
    (failure,) = fills["hanging"].status.failures
    assert (failure.kind, failure.count) == ("quarantined", 1)
    assert "hung" in failure.reason


def test_the_samples_that_are_held_out_are_those_whose_keys_say_so(fills: dict[str, Filled]) -> None:
    held = [n for n in range(60) if xxhash.xxh3_64_intdigest(f"{n}/0".encode()) < 0.25 * 2**64]
    with cs.Cache(fills["curriculum"].status.path) as cache:
        status = cache.status()
        assert (status.holdout, status.held_out_samples, status.num_samples) == (0.25, len(held), 60)
        for split, expected in (("held-out", held), ("train", sorted(set(range(60)) - set(held)))):
            with cache.snapshot(split=split) as dataset:
                assert sorted(dataset[:]["number"].tolist()) == expected
        with pytest.raises(cs.ConfigError, match=r"holdout=0\.5"):
            cs.start_worker(cache, Told(""), holdout=0.5)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cs.Cache]:
    with cs.Cache(tmp_path / "cache", "4MB", min_free=0) as opened:
        yield opened


def test_so_many_processes_read_so_many_units_at_once_and_draw_the_same(
    cache: cs.Cache, tmp_path: Path, fills: dict[str, Filled]
) -> None:
    source = Told(str(tmp_path))
    source.allow(12)
    with cs.start_worker(
        cache, source, num_workers=3, concurrency=4, shard_size=FOUR, seed=5, transform=with_draws
    ) as worker:
        until(lambda: len({pid for pid, _ in source.reads[12:]}) == 3, "three processes wait")
        until(lambda: len(source.reads) >= 12 + 3 + 3, "each with a few units")
        status = worker.status().worker
        assert status is not None
        assert (len(status.states), status.bandwidth_bytes_per_s) == (3, None)
        source.allow(None)
        assert worker.wait(DEADLINE_S)
    assert 6 <= source.most_at_once <= 12
    assert fills["shuffle"].at_once == 1
    with cache.snapshot() as dataset:
        samples = dataset[:]
    draws = dict(zip(samples["number"].tolist(), samples["draw"].tolist(), strict=True))
    assert draws == fills["shuffle"].draws, "whichever process reads, and whatever beside"


def test_the_bandwidth_limit_holds_for_all_processes_together_from_the_first_byte_on(cache: cs.Cache) -> None:
    asked_s: list[float] = []

    def answer(_: str, wanted: str | None) -> Answer:
        asked_s.append(time.monotonic())
        return answer_with(bytes(100_000), wanted)

    with serve(answer) as url:
        urls = [f"{url}/{number}.bin" for number in range(12)]
        with cs.start_worker(cache, urls, num_workers=2, bandwidth_limit="600KB/s") as worker:
            assert worker.wait(DEADLINE_S)
            process = worker.status().worker
            assert process is not None
            assert (process.bandwidth_bytes_per_s, process.totals.fetched_bytes) == (600_000, 1_200_000)
    assert cache.num_samples == 12
    assert max(asked_s) - min(asked_s) > 11 * 100_000 / 600_000 - 0.5, "5 % over any 10 s is half a second"


def test_a_full_cache_is_left_as_it_is_and_filled_on_when_its_limit_is_raised(tmp_path: Path) -> None:
    source = Told(str(tmp_path), units=200, floats=4096)
    with cs.Cache(tmp_path / "cache", "2MB", min_free=0) as cache:
        options: dict[str, Any] = {"num_workers": 1, "concurrency": 2, "shard_size": "65KB"}
        with cs.start_worker(cache, source, when_full="stop", **options) as worker:
            assert worker.wait(DEADLINE_S)
            until(lambda: not worker.is_alive(), "it has stopped")
            assert cache.fill_state() == "full"
        first = numbers_in(cache)
        assert 40 < len(first) < 120
        cache.size_limit = "3MB"
        with cs.start_worker(cache, source, when_full="wait", **options) as worker:
            until(lambda: cache.fill_state() == "full" and cache.num_samples > len(first), "it is full again")
            assert worker.is_alive()
            assert set(first) < set(numbers_in(cache))
            cache.snapshot(turnover=0.5).close()  # of which "evict" would replace a half
            cache.size_limit = "6MB"
            until(lambda: cache.fill_state() == "complete", "it goes on")
        assert numbers_in(cache) == source.numbers
        assert cache.status().evicted_samples == 0


SCRIPT: Final = """
import sys
import cachestream as cs

factor = 3

class Squares:
    fingerprint, num_units = "squares", 20
    def read(self, unit, rng):
        yield str(unit), {"n": unit * unit}

def times(k):
    return lambda sample: {"y": sample["n"] * k * factor}

cache = cs.Cache(PATH, size_limit="20MB", min_free=0)
worker = cs.start_worker(cache, Squares(), num_workers=1, transform=times(2))
assert worker.wait(100), cache.status()
print(cache.num_samples)
"""
# As in a notebook: cells, and no file.
SESSION: Final = """
import code, sys
console = code.InteractiveConsole(globals())
for cell in open(sys.argv[1]).read().split("\\n\\n"):
    console.runsource(cell + "\\n", symbol="exec")
"""


def test_a_script_without_a_guard_and_a_session_give_their_own_classes_and_closures(tmp_path: Path) -> None:
    script, session = tmp_path / "script.py", tmp_path / "cells.py"
    for path in (script, session):
        path.write_text(SCRIPT.replace("PATH", repr(str(path.with_suffix("")))))
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                python(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')")
            ),
            stack.enter_context(python(SESSION, session)),
        ]
        for process in running:
            output, errors = process.communicate(timeout=DEADLINE_S)
            assert output == "20\n", errors
    for path in (script, session):
        with cs.Cache(path.with_suffix("")) as cache:
            until(lambda: not cache.has_worker(), "the worker goes with its script")
            assert cache.fill_state() == "complete"
            with cache.snapshot() as dataset:
                assert sorted(dataset[:]["y"].tolist()) == [6 * n * n for n in range(20)]


BATCHES: Final = Listed([list(range(4)), list(range(4, 8))])
REFUSED: Final[list[tuple[dict[str, Any], str]]] = [
    ({"num_workers": 0}, "num_workers=0"),
    ({"num_workers": 1.5}, r"num_workers=1\.5"),
    ({"transform": 5}, "must be a function"),
    ({"transform": threading.Lock().__enter__}, "the transform cannot be sent"),
    ({"shard_size": "1GB"}, "raise size_limit or lower shard_size"),
    ({"shard_size": 0}, "shard_size=0: must be above 0"),
    ({"order": "random"}, "choose 'shuffle' or 'sequential'"),
    ({"order": 5}, "order=5"),
    ({"order": [1.0]}, "1 weights for 60 units"),
    ({"order": ["a"] * 60}, "weights must be numbers"),
    ({"order": BATCHES}, r"the sampler gave \[0, 1, 2, 3\]; it must give unit numbers"),
    ({"seed": 1.5}, r"seed=1\.5"),
    ({"bandwidth_limit": 0}, "bandwidth_limit"),
    ({"bandwidth_limit": "fast"}, "bandwidth_limit"),
    ({"when_full": "explode"}, "choose one of evict, wait, stop"),
    ({"concurrency": 65}, "1 or more, 64 at most"),
    ({"concurrency": 0}, "concurrency=0"),
    ({"hang_timeout_s": 0}, "hang_timeout_s=0: give seconds"),
    ({"partition": (2, 2)}, "partition="),
    ({"partition": "1:2"}, "partition="),
    ({"linger_s": -1.0}, "linger_s=-1.0: give seconds, 0 or more"),
    ({"linger_s": 1e9}, "86400 at most"),
    ({"holdout": 1.5}, r"holdout=1\.5"),
    ({"engine": "spark"}, "engine='spark': choose one of local, ray"),
    ({"ray_options": {"num_cpus": 1}}, "for the actors of engine='ray'"),
    ({"engine": "ray", "ray_options": {"num_cpus": "2"}}, "'num_cpus' must be"),
    ({"share": ""}, "give the group of caches a name"),
    ({"share_required": True}, "name it with share="),
    ({"share": "a", "replicas": 2}, "no argument 'replicas'"),
    ({"share": "a", "exchange": 0.5}, "no argument 'exchange'"),
    ({"share": "a", "order": [1.0] * 60}, "needs order='shuffle' or 'sequential'"),
    ({"share": "a", "holdout": 0.1}, "share= and holdout= do not go together"),
    ({"workers": 4}, "num_workers"),
    ({"resize": 8}, "resize= belongs to the source"),
]


@pytest.fixture(scope="module")
def unfilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[cs.Cache]:
    with cs.Cache(tmp_path_factory.mktemp("refused") / "cache", "4MB", min_free=0) as opened:
        yield opened


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_refused_by_name_and_starts_nothing(
    unfilled: cs.Cache, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(cs.ConfigError, match=words):
        cs.start_worker(unfilled, Told(""), **options)
    assert (unfilled.has_worker(), unfilled.fill_state()) == (False, "none")


def odd_source(num_units: Any, fingerprint: Any = "data") -> Any:
    class Odd:
        read: Callable[..., Any] = Told.read

    Odd.num_units, Odd.fingerprint = num_units, fingerprint  # type: ignore[attr-defined]
    return Odd()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (odd_source(0), "num_units=0: must be a whole number, 1 or more"),
        (odd_source("x"), "num_units='x'"),
        (odd_source(4, ""), "fingerprint='': must be a str"),
    ],
)
def test_a_source_that_is_none_is_refused(unfilled: cs.Cache, source: Any, words: str) -> None:
    with pytest.raises(cs.ConfigError, match=words):
        cs.start_worker(unfilled, source)
    assert not unfilled.has_worker()


def test_whoever_wants_another_source_or_share_than_the_one_that_is_filled_from_is_refused(
    cache: cs.Cache, tmp_path: Path
) -> None:
    source, other = Told(str(tmp_path)), Told(str(tmp_path), fingerprint="other")
    with cs.start_worker(cache, source, num_workers=1, partition=(0, 2)) as worker:
        assert worker.wait(DEADLINE_S)
        with pytest.raises(cs.ConfigError, match="with the share 0/2, not 1/2; give all processes"):
            cs.start_worker(cache, source, partition=(1, 2))
        with pytest.raises(cs.ConfigError, match="from another source"):
            cs.start_worker(cache, other, partition=(0, 2))
        with cs.start_worker(cache.path, source, partition="0/2") as same:
            assert same.attached
    with pytest.raises(cs.ConfigError, match=r"from another source .* 'cachestream clear CACHE'"):
        cs.start_worker(cache, other)
    cache.clear()
    refused = []
    for node in (0, 1):
        try:
            cs.start_worker(cache, Told(str(tmp_path), units=1), num_workers=1, partition=(node, 2)).stop()
        except cs.ConfigError as error:
            refused.append(str(error))
    (words,) = refused
    assert "the source has 1 units, too few for every node to get one" in words
