"""Shards that were evicted come back from the remote byte for byte, and what comes back different stays out."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs
from cachestream.errors import SampleError, SourceUnavailableError
from cachestream.tools import refetching
from cachestream.tools.refetching import refetch
from cachestream.worker.order import PassPlan
from tests.worker.sources import Named

SOURCE = Named(units=40, samples=5, nbytes=2000)


@dataclass(frozen=True)
class Random(Named):
    """Samples that depend on the generator they are read with."""

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        for key, sample in super().read(unit, rng):
            yield key, {**sample, "noise": rng.random(3)}


def halve(sample: dict[str, Any]) -> dict[str, Any] | None:
    """Half of each sample, and of every seventh nothing; now and then it fails."""
    if sample["number"] == 3:
        raise ValueError("a bad one")
    return None if sample["unit"] % 7 == 0 else {**sample, "x": sample["x"][:1000]}


def noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """A sample and its own draws."""
    return {**sample, "drawn": rng.random(3)}


def double(sample: dict[str, Any]) -> dict[str, Any]:
    """Another transform than `halve`."""
    return {**sample, "x": np.repeat(sample["x"], 2)}


def filled(path: Path, source: Any, transform: Any = None, **options: Any) -> cs.Cache:
    """A cache with all of `source`, in small shards."""
    cache = cs.Cache(path, size_limit="50MB", min_free=0)
    options = {"shard_size": "40KB", "num_workers": 1, **options}
    with cs.start_worker(cache, source, transform=transform, **options) as worker:
        assert worker.wait(180)
    return cache


def trained(cache: cs.Cache, **options: Any) -> list[list[str]]:
    """The keys of all batches of two epochs."""
    with cs.EpochLoader(cache, 8, with_keys=True, **options) as loader:
        return [batch["__key__"] for _ in range(2) for batch in loader]


def digests(cache: cs.Cache) -> set[str]:
    """The digests of the shards' files."""
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(cache.path, "shards").iterdir()}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("order", "transform"),
    [("shuffle", halve), ("shuffle", noisy), ("sequential", None), ("a sampler", halve)],
    ids=["shuffle", "random transform", "sequential", "a sampler"],
)
def test_evicted_shards_come_back_byte_for_byte_and_the_epochs_with_them(
    order: str, transform: Any, tmp_path: Path
) -> None:
    source = Random(units=40, samples=5, nbytes=2000)
    kind = {"a sampler": list(np.random.default_rng(0).permutation(40))}.get(order, order)
    with filled(tmp_path / "cache", source, transform, order=iter_again(kind), num_workers=2) as cache:
        before = digests(cache)
        batches = trained(cache, record=tmp_path / "run")
        cache.evict(100_000)
        assert digests(cache) < before
        report = refetch(tmp_path / "run", cache, source, transform=transform)
        assert report.ok, report.failed
        assert report.brought
        assert (report.wanted, report.cached + report.brought) == (len(before), len(before))
        assert digests(cache) == before
        assert trained(cache, replay=tmp_path / "run") == batches
        assert cache.verify().ok
        assert refetch(tmp_path / "run", cache, source).brought == 0


@pytest.mark.e2e
def test_windows_of_tokens_that_are_damaged_or_evicted_come_back(tmp_path: Path) -> None:
    source, packing = Named(units=20, samples=5, nbytes=200), cs.pack_tokens(49, "x", eos=256)
    with filled(tmp_path / "cache", source, packing, shard_size="16KB") as cache:
        before = digests(cache)
        batches = trained(cache, record=tmp_path / "run")
        damaged = min(Path(cache.path, "shards").iterdir())
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
        cache.verify(repair=True)
        assert len(digests(cache)) == len(before) - 1
        cache.evict(cache.size_bytes - 60_000)
        for other in (None, cs.pack_tokens(29, "x", eos=256)):
            with pytest.raises(
                cs.ConfigError, match=r"was trained on .*packed:49.*, not on .* its pack_tokens"
            ):
                refetch(tmp_path / "run", cache, source, transform=other)
        report = refetch(tmp_path / "run", cache, source, transform=packing)
        assert report.ok, report.failed
        assert 1 < report.brought < len(before)
        assert digests(cache) == before
        assert trained(cache, replay=tmp_path / "run") == batches


class Drawn:
    """A sampler over units."""

    def __init__(self, units: list[int]) -> None:
        self.units = units

    def __iter__(self) -> Iterator[int]:
        return iter(self.units)


def iter_again(order: Any) -> Any:
    return Drawn(order) if isinstance(order, list) else order


@pytest.mark.e2e
def test_an_empty_directory_becomes_a_cache_to_replay_from(tmp_path: Path) -> None:
    with filled(tmp_path / "cache", SOURCE, seed=3) as cache:
        batches = trained(cache, record=tmp_path / "run")
    with cs.Cache(tmp_path / "other", size_limit="50MB", min_free=0) as other:
        report = refetch(tmp_path / "run" / "epoch-000001.json", other, SOURCE)
        assert report.ok
        assert digests(other) == digests(cache)
        assert trained(other, replay=tmp_path / "run") == batches
        # A worker that goes on there fetches nothing twice.
        with cs.start_worker(other, SOURCE, seed=3) as worker:
            assert worker.wait(180)
        assert other.num_samples == len(SOURCE.keys())


@pytest.mark.e2e
def test_a_worker_goes_on_after_a_refetch_and_has_every_sample_once(tmp_path: Path) -> None:
    """Evicted, fetched again by a second pass, and some of it brought back: nothing is there twice."""
    with filled(tmp_path / "cache", SOURCE) as cache:
        trained(cache, record=tmp_path / "run")
        cache.evict(200_000)
        first = refetch(tmp_path / "run", cache, SOURCE)
        assert first.ok
        cache.evict(100_000)
        with cs.start_worker(cache, SOURCE) as worker:
            assert worker.wait(180)
        with cache.snapshot() as dataset:
            assert sorted(dataset.keys()) == sorted(SOURCE.keys())
        second = refetch(tmp_path / "run", cache, SOURCE)
        assert not second.ok
        assert all("other shards hold some of its samples by now" in reason for reason in second.failed)
        with cache.snapshot() as dataset:
            assert sorted(dataset.keys()) == sorted(SOURCE.keys())


@pytest.mark.e2e
def test_what_comes_back_different_stays_out_and_is_told(tmp_path: Path) -> None:
    with filled(tmp_path / "cache", SOURCE, halve) as cache:
        trained(cache, record=tmp_path / "run")
        held = cache.num_shards
        cache.evict(0)
        report = refetch(tmp_path / "run", cache, SOURCE, transform=double)
        assert len(report.failed) == report.wanted == held
        assert "came back different" in report.failed[0]
        assert cache.num_shards == 0
        for wrong in (Named(units=41, samples=5, nbytes=2000), Named(40, 5, 2000, name="another")):
            with pytest.raises(cs.ConfigError, match="was trained on numbers:40x5"):
                refetch(tmp_path / "run", cache, wrong)


def three(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Three samples, of which the second has another number of dimensions."""
    x = sample["x"][:100]
    return [{"x": x}, {"x": x.reshape(10, 10)}, {"x": x}]


@pytest.mark.e2e
def test_samples_that_the_worker_left_out_are_left_out_again_whichever_comes_first(tmp_path: Path) -> None:
    odd = [{"x": np.zeros((4, 4))}, *({"x": np.full((3, 4, 4), i)} for i in range(1, 60))]
    for source, transform in ((SOURCE, three), (cs.DatasetSource(odd), None)):
        path = tmp_path / ("several" if transform else "odd")
        with filled(path / "cache", source, transform, order="sequential") as cache:
            trained(cache, record=path / "run")
        with cs.Cache(path / "empty", size_limit="50MB", min_free=0) as empty:
            report = refetch(path / "run", empty, source, transform=transform)
            assert report.ok, report.failed


@pytest.mark.e2e
def test_needed_shards_are_kept_while_others_come_within_the_limit(tmp_path: Path) -> None:
    big = Named(units=60, samples=5, nbytes=10_000)
    with filled(tmp_path / "cache", big, shard_size="100KB") as cache:
        batches = trained(cache, epoch_size=120, record=tmp_path / "run")
    first, second = sorted((tmp_path / "run").iterdir())
    with cs.Cache(tmp_path / "small", size_limit=2_500_000, min_free=0) as small:
        assert refetch(first, small, big).cached == 0
        assert small.status().evicted_shards == 0
        report = refetch(second, small, big)
        assert report.ok
        assert small.status().evicted_shards > 0
        assert small.size_bytes <= 2_500_000
        with cs.EpochLoader(small, 8, with_keys=True, replay=second) as loader:
            assert [batch["__key__"] for batch in loader] == batches[15:]
        small.size_limit = 1_300_000
        with pytest.raises(cs.CacheFullError, match=r"no space in .* that the epochs need"):
            refetch(first, small, big)


@dataclass(frozen=True)
class FailingRemote(Named):
    """A remote that fails as many times as the file `failures` has bytes, in the middle of a unit."""

    failures: str = ""

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        for number, sample in enumerate(super().read(unit, rng)):
            if number == 2 and (left := Path(self.failures).read_bytes()):
                Path(self.failures).write_bytes(left[1:])
                raise SourceUnavailableError("503 from the remote")
            yield sample


@pytest.mark.e2e
def test_a_remote_that_fails_is_asked_again_and_ends_the_command_if_it_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refetching, "_GIVE_UP_S", 1.0)
    never, often, seldom = tmp_path / "never", tmp_path / "often", tmp_path / "seldom"
    for path, failures in ((never, 0), (often, 1000), (seldom, 5)):
        path.write_bytes(bytes(failures))
    source = FailingRemote(units=10, samples=5, nbytes=2000, failures=str(never))
    cache = filled(tmp_path / "cache", source)
    before = digests(cache)
    trained(cache, record=tmp_path / "epochs")
    cache.evict(0)
    with pytest.raises(SourceUnavailableError, match="503 from the remote"):
        refetch(tmp_path / "epochs", cache, replace(source, failures=str(often)))
    monkeypatch.undo()
    assert refetch(tmp_path / "epochs", cache, replace(source, failures=str(seldom))).ok
    assert digests(cache) == before


def test_a_slow_read_has_its_time_after_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refetching, "_GIVE_UP_S", 0.1)
    left = [SourceUnavailableError("503 from the remote")]

    class Slow(Named):
        def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
            time.sleep(0.2)
            if left:
                raise left.pop()
            yield from super().read(unit, rng)

    plan = PassPlan("sequential", 0, 0, 1, "", 1)
    found = refetching._read_part(Slow(units=1, samples=3, nbytes=10), plan, (0, 0, 3))
    assert len(found) == 3


@pytest.mark.e2e
def test_the_transform_is_called_in_the_thread_of_the_caller(tmp_path: Path) -> None:
    """A worker calls it in one thread, too."""
    cache = filled(tmp_path / "cache", SOURCE, halve)
    trained(cache, record=tmp_path / "epochs")
    cache.evict(0)
    threads: set[int] = set()

    def watched(sample: dict[str, Any]) -> dict[str, Any] | None:
        threads.add(threading.get_ident())
        return halve(sample)

    assert refetch(tmp_path / "epochs", cache, SOURCE, transform=watched).ok
    assert threads == {threading.get_ident()}


@dataclass(frozen=True)
class Shortened(Named):
    """A remote whose units end after three samples by now."""

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        yield from islice(super().read(unit, rng), 3)
        raise SampleError("truncated by now")


@pytest.mark.e2e
def test_a_unit_that_was_damaged_since_is_told(tmp_path: Path) -> None:
    cache = filled(tmp_path / "cache", SOURCE)
    trained(cache, record=tmp_path / "epochs")
    cache.evict(0)
    report = refetch(tmp_path / "epochs", cache, Shortened(SOURCE.units, SOURCE.samples, SOURCE.nbytes))
    assert report.brought == 0
    assert "the remote has changed: truncated by now" in report.failed[0]


@pytest.mark.e2e
def test_a_running_worker_is_in_the_way(tmp_path: Path) -> None:
    cache = cs.Cache(tmp_path / "cache", size_limit="50MB", min_free=0)
    with cache, cs.start_worker(cache, SOURCE, num_workers=1) as worker:
        assert worker.wait(180)
        trained(cache, record=tmp_path / "run")
        with pytest.raises(cs.CacheError, match="a worker is filling"):
            refetch(tmp_path / "run", cache, SOURCE)
