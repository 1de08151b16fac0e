"""`on_change=`: samples that another transform made are replaced, kept or refused."""

from __future__ import annotations

import io
import logging
import os
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cachestream as cs

# The sampling processes import this module: nothing here loads torch.
DEADLINE_S = 60.0


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cs.Cache]:
    with cs.Cache(tmp_path / "cache", size_limit="50MB", min_free=0) as cache:
        yield cache


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings of this package since the last call."""
    caplog.set_level(logging.WARNING, "cachestream")

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return take


def fill(cache: cs.Cache, transform: Any, num: int = 20, **options: Any) -> None:
    source = [{"x": np.full(1000, i, np.uint8)} for i in range(num)]
    with cs.start_worker(cache, source, num_workers=1, transform=transform, **options) as worker:
        assert worker.wait(DEADLINE_S)


class Gate:
    """Lets samples through a transform one by one, in whatever process: as many as a test allows."""

    def __init__(self, folder: Path) -> None:
        self._allowed, self._asked = str(folder / "allowed"), str(folder / "asked")
        for path in (self._allowed, self._asked):
            open(path, "xb").close()

    def allow(self, num: int) -> None:
        with open(self._allowed, "ab") as file:
            file.write(bytes(num))

    def wait(self) -> None:
        with open(self._asked, "ab", buffering=0) as file:
            file.write(b"1")
            place = file.tell()
        while os.path.getsize(self._allowed) < place:
            time.sleep(0.002)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def plus(k: int, gate: Gate | None = None) -> Callable[[Any], Any]:
    def transform(sample: Any) -> Any:
        if gate is not None:
            gate.wait()
        return {"x": sample["x"] + k}

    return transform


def values(cache: cs.Cache) -> dict[str, list[int]]:
    """The first value of each sample of an epoch, by the sample's key."""
    with cache.snapshot() as dataset:
        found: dict[str, list[int]] = {}
        for index, key in enumerate(dataset.keys()):
            found.setdefault(key, []).append(int(dataset[index]["x"][0]))
        return found


NUM = 120
OLD, NEW = ({str(i): [(i + k) % 256] for i in range(NUM)} for k in (0, 100))


def watch(cache: cs.Cache, worker: cs.Worker, gate: Gate, least: int = 0) -> list[dict[str, list[int]]]:
    """Epochs while the worker replaces samples; no sample may be in one in two versions."""
    epochs = []
    deadline_s = time.monotonic() + DEADLINE_S
    while cache.status().outdated_samples > least:
        assert time.monotonic() < deadline_s
        gate.allow(5)
        assert worker.is_alive()
        epochs.append(values(cache))
        for key, found in epochs[-1].items():
            assert found in (OLD[key], NEW[key])
    return epochs


@pytest.mark.parametrize(
    "shard_size", ["1KB", "30KB", "1MB"], ids=["one a shard", "some a shard", "all in one"]
)
def test_samples_of_another_transform_are_replaced_and_never_in_an_epoch_in_two_versions(
    cache: cs.Cache, warned: Callable[[], list[str]], gate: Gate, shard_size: str
) -> None:
    fill(cache, plus(0), NUM, shard_size=shard_size)
    source = [{"x": np.full(1000, i, np.uint8)} for i in range(NUM)]
    options: dict[str, Any] = {"num_workers": 2, "shard_size": shard_size, "concurrency": 2}
    with cs.start_worker(cache, source, transform=plus(100, gate), **options) as worker:
        (warning,) = warned()
        assert f"{NUM} of the {NUM} cached samples were made by another one; they are read anew" in warning
        status = cache.status()
        assert not status.outdated_samples or status.is_replacing
        assert status.num_units == NUM
        epochs = watch(cache, worker, gate)
        gate.allow(NUM)
        assert worker.wait(DEADLINE_S)
        assert values(cache) == NEW
        assert cache.num_samples == NUM
        assert cache.status().outdated_samples == 0
    if shard_size != "1MB":
        # Of each process one shard at most, a quarter of all, is gone before its samples are there anew.
        assert min(map(len, epochs)) >= NUM * 0.5
        assert any(
            0 < sum(found == NEW[key] for key, found in epoch.items()) < len(epoch) for epoch in epochs
        )


def test_a_sample_that_is_read_anew_is_read_once_and_what_was_never_read_comes_after(
    cache: cs.Cache, tmp_path: Path, gate: Gate
) -> None:
    read = tmp_path / "read"

    def source_of(name: str) -> Any:
        path = str(read) + name

        class Noted:
            def __len__(self) -> int:
                return NUM

            def __getitem__(self, index: int) -> Any:
                with open(path, "a") as file:
                    file.write(f"{index}\n")
                return {"x": np.full(1000, index, np.uint8)}

            fingerprint = "noted"

        return Noted()

    with cs.start_worker(
        cache, source_of("1"), num_workers=1, transform=plus(0, gate), shard_size="20KB"
    ) as worker:
        gate.allow(60)
        cache.wait(60, timeout_s=DEADLINE_S)
        worker.stop()
    old = set(values(cache))
    assert len(old) < NUM
    with cs.start_worker(
        cache, source_of("2"), num_workers=1, transform=plus(100), shard_size="20KB", concurrency=2
    ) as worker:
        assert worker.wait(DEADLINE_S)
    indices = Path(str(read) + "2").read_text().split()
    assert sorted(map(int, indices)) == list(range(NUM)), "each once"
    assert old <= set(indices[: len(old) + 20]), (
        "the outdated ones first, but for those that are read beside them"
    )
    assert values(cache) == NEW


def test_a_worker_that_is_killed_goes_on_replacing_where_it_was(cache: cs.Cache, gate: Gate) -> None:
    fill(cache, plus(0), NUM, shard_size="20KB")
    source = [{"x": np.full(1000, i, np.uint8)} for i in range(NUM)]
    for least in (80, 0):
        with cs.start_worker(
            cache, source, num_workers=1, concurrency=1, transform=plus(100, gate), shard_size="20KB"
        ) as worker:
            watch(cache, worker, gate, least)
            status = cache.status().worker
            if least:
                assert status is not None, "it is still at work"
                os.kill(status.pid, signal.SIGKILL)
                worker.stop()  # nobody is to replace it here
            else:
                gate.allow(NUM)
                assert worker.wait(DEADLINE_S)
        assert all(found in (OLD[key], NEW[key]) for key, found in values(cache).items())
    assert values(cache) == NEW


@pytest.mark.parametrize("is_held", [False, True])
def test_a_lost_catalogue_brings_no_outdated_sample_back(cache: cs.Cache, is_held: bool) -> None:
    fill(cache, plus(0), NUM, shard_size="20KB")
    with cache.snapshot() if is_held else nullcontext():  # an epoch, which keeps the old shards there
        fill(cache, plus(100), NUM, shard_size="20KB")
        assert values(cache) == NEW
        cache.close()
        os.unlink(os.path.join(cache.path, "catalogue.sqlite"))
        with cs.Cache(cache.path) as again:
            assert again.num_samples == (2 * NUM if is_held else NUM)
            fill(again, plus(100), NUM, shard_size="20KB")
            assert values(again) == NEW
            assert again.status().outdated_samples == 0


@pytest.mark.parametrize(
    ("when_full", "is_used"), [("evict", False), ("wait", True)], ids=["nobody trained on", "trained on"]
)
def test_a_full_cache_is_replaced_too(tmp_path: Path, gate: Gate, when_full: str, is_used: bool) -> None:
    source = [{"x": np.full(100_000, i, np.uint8)} for i in range(NUM)]
    options: dict[str, Any] = {
        "num_workers": 1,
        "concurrency": 2,
        "shard_size": "500KB",
        "when_full": when_full,
    }
    with cs.Cache(tmp_path / "cache", size_limit="12MB", min_free=0) as cache:
        with cs.start_worker(cache, source, transform=plus(0), **options) as worker:
            assert worker.wait(DEADLINE_S)
        before = cache.num_samples
        assert before < NUM
        if is_used:
            cache.snapshot().close()
        with cs.start_worker(cache, source, transform=plus(100, gate), **options) as worker:
            epochs = watch(cache, worker, gate) if is_used else []
            deadline_s = time.monotonic() + DEADLINE_S
            while cache.status().outdated_samples:  # without an epoch, by which the cache would be used
                assert time.monotonic() < deadline_s
                assert worker.is_alive()
                gate.allow(5)
                time.sleep(0.02)
            assert cache.num_samples > before * 0.6
        assert min(map(len, epochs), default=before) > before * 0.6
        assert all(found == NEW[key] for key, found in values(cache).items())


def test_units_of_many_samples_are_replaced_as_they_come(cache: cs.Cache, tmp_path: Path, gate: Gate) -> None:
    for number in range(4):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for place in range(30):
                data = io.BytesIO()
                np.save(data, np.full(1000, number * 30 + place, np.uint8))
                member = tarfile.TarInfo(f"{number * 30 + place}.x.npy")
                member.size = data.tell()
                data.seek(0)
                tar.addfile(member, data)

    def source() -> Any:
        return cs.open_source(str(tmp_path / "{0..3}.tar"))

    def transform(k: int) -> Any:
        made = plus(k, gate)
        return lambda sample: made({"x": sample["x.npy"]})

    options: dict[str, Any] = {"num_workers": 1, "shard_size": "15KB"}
    gate.allow(NUM)
    with cs.start_worker(cache, source(), transform=transform(0), **options) as worker:
        assert worker.wait(DEADLINE_S)
    assert cache.num_samples == NUM
    with cs.start_worker(cache, source(), transform=transform(100), **options) as worker:
        deadline_s = time.monotonic() + DEADLINE_S
        while cache.status().outdated_samples:
            assert time.monotonic() < deadline_s
            gate.allow(5)
            assert cache.num_samples > NUM - 60, "a part of a unit takes the place of that part"
            found = values(cache)
            assert all(len(one) == 1 for one in found.values())
        gate.allow(NUM)
        assert worker.wait(DEADLINE_S)
    assert sorted(one for (one,) in values(cache).values()) == sorted((i + 100) % 256 for i in range(NUM))


def test_samples_are_kept_or_refused_if_that_is_asked_for(
    cache: cs.Cache, warned: Callable[[], list[str]]
) -> None:
    fill(cache, plus(0), 20)
    fill(cache, plus(100), 20, on_change="keep")
    assert values(cache) == {key: OLD[key] for key in map(str, range(20))}
    assert cache.status().outdated_samples == 20
    warned()
    with pytest.raises(
        cs.ConfigError, match=r"20 of the 20 samples .* another transform .* on_change='refuse'"
    ):
        fill(cache, plus(100), 20, on_change="refuse")
    fill(cache, plus(0), 20, on_change="refuse")
    with pytest.raises(cs.ConfigError, match="on_change='later': choose one of replace, keep, refuse"):
        fill(cache, None, on_change="later")


def test_who_attaches_to_a_worker_of_another_transform_replaces_nothing(
    cache: cs.Cache, warned: Callable[[], list[str]], gate: Gate
) -> None:
    fill(cache, plus(0), NUM, shard_size="20KB")
    source = [{"x": np.full(1000, i, np.uint8)} for i in range(NUM)]
    options: dict[str, Any] = {"num_workers": 1, "concurrency": 1, "shard_size": "20KB"}
    with cs.start_worker(cache, source, transform=plus(100, gate), **options) as worker:
        with cs.start_worker(cache, source, transform=plus(7), **options) as other:
            assert other.attached
            assert any("goes on with the one before" in warning for warning in warned())
            with pytest.raises(cs.ConfigError, match="on_change='refuse'"):
                cs.start_worker(cache, source, transform=plus(7), on_change="refuse")
            watch(cache, worker, gate)
        gate.allow(NUM)
        assert worker.wait(DEADLINE_S)
        assert values(cache) == NEW


def test_a_transform_that_makes_other_fields_cannot_replace_and_says_so(cache: cs.Cache) -> None:
    fill(cache, plus(0), NUM)
    with pytest.raises(cs.WorkerError, match=r"other fields than those cached .*'cachestream clear'"):
        fill(cache, lambda sample: {"y": sample["x"]}, NUM)
    assert values(cache) == OLD


@pytest.mark.parametrize("order", [[1.0] * 50, "sequential"], ids=["with replacement", "sequential"])
def test_samples_are_replaced_whatever_the_order(cache: cs.Cache, order: Any) -> None:
    fill(cache, plus(0), 50, order=order, shard_size="20KB")
    fill(cache, plus(100), 50, order=order, shard_size="20KB")
    assert cache.status().outdated_samples == 0


def test_samples_that_the_new_transform_leaves_out_go_and_those_that_it_cannot_make_stay(
    cache: cs.Cache,
) -> None:
    def fails(sample: Any) -> Any:
        raise ValueError("not this one")

    fill(cache, plus(0))
    fill(cache, fails)
    assert cache.status().outdated_samples == 20
    assert set(values(cache)) == set(map(str, range(20)))
    fill(cache, lambda _: None)
    assert cache.status().outdated_samples == 0
    assert cache.num_samples == 0


@pytest.fixture
def start_with(cache: cs.Cache, tmp_path: Path) -> Callable[..., cs.Worker]:
    """Start a worker for files of which this option of the source makes samples."""
    (tmp_path / "files").mkdir()
    for i in range(10):
        (tmp_path / "files" / f"{i}.json").write_text(f'{{"x": [{i}]}}')

    def start(default: int, **options: Any) -> cs.Worker:
        source = cs.open_source(str(tmp_path / "files" / "*.json"), fields={"y": default})
        return cs.start_worker(cache, source, num_workers=1, **options)

    return start


def test_samples_of_other_options_of_the_source_are_replaced_too(
    cache: cs.Cache, start_with: Callable[..., cs.Worker]
) -> None:
    def fill_with(default: int, **options: Any) -> set[int]:
        with start_with(default, **options) as worker:
            assert worker.wait(DEADLINE_S)
        with cache.snapshot() as dataset:
            assert len(dataset) == 10
            return {int(dataset[i]["y"]) for i in range(10)}

    assert fill_with(1) == {1}
    assert fill_with(2, on_change="keep") == {1}
    assert cache.status().outdated_samples == 10
    with pytest.raises(cs.ConfigError, match="on_change='refuse'"):
        fill_with(2, on_change="refuse")
    assert fill_with(2) == {2}
    assert cache.status().outdated_samples == 0
    cache.close()
    os.unlink(os.path.join(cache.path, "catalogue.sqlite"))
    with cs.Cache(cache.path):
        assert fill_with(3) == {3}, "the shards tell that it is the same data"


def test_who_attaches_with_other_options_of_the_source_gets_the_samples_of_the_running_worker(
    cache: cs.Cache, start_with: Callable[..., cs.Worker], warned: Callable[[], list[str]]
) -> None:
    with start_with(1), start_with(2) as other:
        assert other.attached
        assert any("goes on with the one before" in warning for warning in warned())
        with pytest.raises(cs.ConfigError, match="on_change='refuse'"):
            start_with(2, on_change="refuse")
