"""A changed transform is told at every start for as long as samples of another one are cached, and named where it is the cause."""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cachestream as cs

DEADLINE_S = 60.0
SCALE = [1.0]
OPTIONS = argparse.Namespace(size=1, epochs=1)


class Warned:
    """The warnings of this package since the last call."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.WARNING, "cachestream")

    def __call__(self) -> list[str]:
        found = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return found


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Warned:
    return Warned(caplog)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[cs.Cache]:
    with cs.Cache(tmp_path / "cache", size_limit="50MB", min_free=0) as cache:
        yield cache


def fill(cache: cs.Cache, transform: Any, num: int = 20, **options: Any) -> None:
    source = [{"x": np.full(1000, i, np.uint8)} for i in range(num)]
    with cs.start_worker(cache, source, num_workers=1, transform=transform, **options) as worker:
        assert worker.wait(DEADLINE_S)


def add(sample: Any, k: int) -> Any:
    return {"x": sample["x"] + k}


class Add:
    def __init__(self, k: Any) -> None:
        self.k = k

    def __call__(self, sample: Any) -> Any:
        return add(sample, self.k)


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def closure(k: Any) -> Callable[[Any], Any]:
    return lambda sample: add(sample, k)


def with_default(k: Any) -> Callable[[Any], Any]:
    def transform(sample: Any, *, bias: Any = k) -> Any:
        return add(sample, bias)

    return transform


def decorated(k: Any) -> Callable[[Any], Any]:
    return torch.no_grad()(closure(k))


def uses_globals(sample: Any) -> Any:
    return {"x": sample["x"] * SCALE[0] + OPTIONS.size}


@pytest.mark.e2e
def test_each_start_tells_the_samples_of_another_transform_and_going_back_tells_nothing(
    cache: cs.Cache, warned: Warned
) -> None:
    fill(cache, closure(1))
    assert warned() == []
    for _ in range(2):
        fill(cache, closure(2), on_change="keep")
        (warning,) = warned()
        assert "the transform has changed" in warning
        assert "20 of the 20 cached samples" in warning
        assert "'cachestream clear'" in warning
    status = cache.status()
    assert status.outdated_samples == 20
    assert "20 samples of another transform" in str(status)
    shown = subprocess.run(
        [sys.executable, "-m", "cachestream", "status", cache.path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the transform has changed" in " ".join(shown.stdout.split())
    fill(cache, closure(1))
    assert warned() == []
    assert cache.status().outdated_samples == 0
    cache.clear()
    fill(cache, None)
    assert warned() == []


@pytest.mark.e2e
def test_the_shards_tell_it_after_the_catalogue_was_lost(cache: cs.Cache, warned: Warned) -> None:
    fill(cache, closure(1))
    cache.close()
    os.unlink(os.path.join(cache.path, "catalogue.sqlite"))
    with cs.Cache(cache.path) as again:
        fill(again, closure(2), on_change="keep")
    assert any("20 of the 20 cached samples" in warning for warning in warned())


# --- on_change=


def values(cache: cs.Cache) -> dict[str, list[int]]:
    """The first value of each sample of an epoch, by the sample's key."""
    with cache.snapshot() as dataset:
        found: dict[str, list[int]] = {}
        for index, key in enumerate(dataset.keys()):
            found.setdefault(key, []).append(int(dataset[index]["x"][0]))
        return found


def slow(k: int, seconds: float) -> Callable[[Any], Any]:
    def transform(sample: Any) -> Any:
        time.sleep(seconds)
        return add(sample, k)

    return transform


NUM = 200
OLD, NEW = ({str(i): [(i + k) % 256] for i in range(NUM)} for k in (0, 100))


def watch(cache: cs.Cache, worker: cs.Worker, least: int = 0) -> list[dict[str, list[int]]]:
    """Epochs while the worker replaces samples; no sample may be in one in two versions."""
    epochs = []
    deadline_s = time.monotonic() + DEADLINE_S
    while cache.status().outdated_samples > least:
        assert time.monotonic() < deadline_s
        assert worker.is_alive()
        epochs.append(values(cache))
        for key, found in epochs[-1].items():
            assert found in (OLD[key], NEW[key])
    return epochs


@pytest.mark.parametrize(
    "shard_size", ["1KB", "30KB", "1MB"], ids=["one a shard", "some a shard", "all in one"]
)
def test_samples_of_another_transform_are_replaced_and_never_in_an_epoch_in_two_versions(
    cache: cs.Cache, warned: Warned, shard_size: str
) -> None:
    fill(cache, closure(0), NUM, shard_size=shard_size)
    source = [{"x": np.full(1000, i, np.uint8)} for i in range(NUM)]
    options: dict[str, Any] = {"num_workers": 2, "shard_size": shard_size, "concurrency": 2}
    with cs.start_worker(cache, source, transform=slow(100, 0.01), **options) as worker:
        (warning,) = warned()
        assert f"{NUM} of the {NUM} cached samples were made by another one; they are read anew" in warning
        epochs = watch(cache, worker)
        assert worker.wait(DEADLINE_S)
        assert values(cache) == NEW
        assert cache.num_samples == NUM
        assert cache.status().outdated_samples == 0
    if shard_size != "1MB":
        assert min(map(len, epochs)) > NUM * 0.7, "the cache hardly shrinks meanwhile"
        assert any(
            0 < sum(found == NEW[key] for key, found in epoch.items()) < len(epoch) for epoch in epochs
        )


def test_a_sample_that_is_read_anew_is_read_once_and_what_was_never_read_comes_after(
    cache: cs.Cache, tmp_path: Path
) -> None:
    read = tmp_path / "read"

    def source_of(name: str) -> Any:
        path = str(read) + name

        class Noted(torch.utils.data.Dataset[Any]):
            def __len__(self) -> int:
                return NUM

            def __getitem__(self, index: int) -> Any:
                with open(path, "a") as file:
                    file.write(f"{index}\n")
                return {"x": np.full(1000, index, np.uint8)}

            fingerprint = "noted"

        return Noted()

    with cs.start_worker(
        cache, source_of("1"), num_workers=1, transform=slow(0, 0.01), shard_size="20KB"
    ) as worker:
        cache.wait(60, timeout_s=DEADLINE_S)
        worker.stop()
    old = set(values(cache))
    assert len(old) < NUM
    with cs.start_worker(
        cache, source_of("2"), num_workers=1, transform=slow(100, 0.0), shard_size="20KB"
    ) as worker:
        assert worker.wait(DEADLINE_S)
    indices = Path(str(read) + "2").read_text().split()
    assert sorted(map(int, indices)) == list(range(NUM)), "each once"
    assert set(indices[: len(old)]) == old, "the outdated ones first"
    assert values(cache) == NEW


def test_a_worker_that_is_killed_goes_on_replacing_where_it_was(cache: cs.Cache) -> None:
    fill(cache, closure(0), NUM, shard_size="20KB")
    source = [{"x": np.full(1000, i, np.uint8)} for i in range(NUM)]
    for least in (150, 70, 0):
        with cs.start_worker(
            cache, source, num_workers=1, concurrency=1, transform=slow(100, 0.01), shard_size="20KB"
        ) as worker:
            watch(cache, worker, least)
            status = cache.status().worker
            if least and status is not None:
                os.kill(status.pid, signal.SIGKILL)
                with pytest.raises(cs.WorkerError):
                    worker.stop() or worker.wait(DEADLINE_S)
            elif not least:
                assert worker.wait(DEADLINE_S)
        assert all(found in (OLD[key], NEW[key]) for key, found in values(cache).items())
    assert values(cache) == NEW


def test_a_lost_catalogue_brings_no_outdated_sample_back(cache: cs.Cache) -> None:
    fill(cache, closure(0), NUM, shard_size="20KB")
    fill(cache, slow(100, 0.0), NUM, shard_size="20KB")
    assert values(cache) == NEW
    cache.close()
    os.unlink(os.path.join(cache.path, "catalogue.sqlite"))
    with cs.Cache(cache.path) as again:
        fill(again, slow(100, 0.0), NUM, shard_size="20KB")
        assert values(again) == NEW
        assert again.status().outdated_samples == 0


@pytest.mark.parametrize("is_used", [False, True], ids=["nobody trained on", "trained on"])
@pytest.mark.parametrize("when_full", ["evict", "wait"])
def test_a_full_cache_is_replaced_too(tmp_path: Path, when_full: str, is_used: bool) -> None:
    source = [{"x": np.full(100_000, i, np.uint8)} for i in range(NUM)]
    options: dict[str, Any] = {"num_workers": 1, "shard_size": "500KB", "when_full": when_full}
    with cs.Cache(tmp_path / "cache", size_limit="12MB", min_free=0) as cache:
        with cs.start_worker(cache, source, transform=closure(0), **options) as worker:
            assert worker.wait(DEADLINE_S)
        before = cache.num_samples
        assert before < NUM
        if is_used:
            cache.snapshot().close()
        with cs.start_worker(cache, source, transform=slow(100, 0.002), **options) as worker:
            epochs = watch(cache, worker)
            assert cache.status().outdated_samples == 0
            assert cache.num_samples > before * 0.6
        assert min(map(len, epochs), default=before) > before * 0.6
        assert all(found == NEW[key] for key, found in values(cache).items())


def test_units_of_many_samples_are_replaced_as_they_come(cache: cs.Cache, tmp_path: Path) -> None:
    for number in range(4):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            for place in range(50):
                data = io.BytesIO()
                np.save(data, np.full(1000, number * 50 + place, np.uint8))
                member = tarfile.TarInfo(f"{number * 50 + place}.x.npy")
                member.size = data.tell()
                data.seek(0)
                tar.addfile(member, data)

    def source() -> Any:
        return cs.open_source(str(tmp_path / "{0..3}.tar"))

    def transform(k: int) -> Any:
        return lambda sample: {"x": sample["x.npy"] + k} if time.sleep(0.005) is None else None

    options: dict[str, Any] = {"num_workers": 1, "shard_size": "15KB"}
    with cs.start_worker(cache, source(), transform=transform(0), **options) as worker:
        assert worker.wait(DEADLINE_S)
    assert cache.num_samples == NUM
    with cs.start_worker(cache, source(), transform=transform(100), **options) as worker:
        deadline_s = time.monotonic() + DEADLINE_S
        while cache.status().outdated_samples:
            assert time.monotonic() < deadline_s
            assert cache.num_samples > NUM - 60, "a part of a unit takes the place of that part"
            found = values(cache)
            assert all(len(one) == 1 for one in found.values())
        assert worker.wait(DEADLINE_S)
    assert sorted(one for (one,) in values(cache).values()) == sorted((i + 100) % 256 for i in range(NUM))


def test_samples_are_kept_or_refused_if_that_is_asked_for(cache: cs.Cache, warned: Warned) -> None:
    fill(cache, closure(0), 20)
    fill(cache, closure(100), 20, on_change="keep")
    assert values(cache) == {key: OLD[key] for key in map(str, range(20))}
    assert cache.status().outdated_samples == 20
    warned()
    with pytest.raises(
        cs.ConfigError, match=r"20 of the 20 samples .* another transform .* on_change='refuse'"
    ):
        fill(cache, closure(100), 20, on_change="refuse")
    fill(cache, closure(0), 20, on_change="refuse")
    with pytest.raises(cs.ConfigError, match="on_change='later': choose one of replace, keep, refuse"):
        fill(cache, None, on_change="later")


def test_who_attaches_to_a_worker_of_another_transform_replaces_nothing(
    cache: cs.Cache, warned: Warned
) -> None:
    fill(cache, closure(0), NUM, shard_size="20KB")
    source = [{"x": np.full(1000, i, np.uint8)} for i in range(NUM)]
    options: dict[str, Any] = {"num_workers": 1, "concurrency": 1, "shard_size": "20KB"}
    with cs.start_worker(cache, source, transform=slow(100, 0.005), **options) as worker:
        with cs.start_worker(cache, source, transform=closure(7), **options) as other:
            assert other.attached
            assert any("goes on with the one before" in warning for warning in warned())
            with pytest.raises(cs.ConfigError, match="on_change='refuse'"):
                cs.start_worker(cache, source, transform=closure(7), on_change="refuse")
            watch(cache, worker)
        assert worker.wait(DEADLINE_S)
        assert values(cache) == NEW


def test_a_transform_that_makes_other_fields_cannot_replace_and_says_so(cache: cs.Cache) -> None:
    fill(cache, closure(0), NUM)
    with pytest.raises(cs.WorkerError, match=r"other fields than those cached .* 'cachestream clear'"):
        fill(cache, lambda sample: {"y": sample["x"]}, NUM)
    assert values(cache) == OLD


@pytest.mark.parametrize("order", [[1.0] * 50, "sequential"], ids=["with replacement", "sequential"])
def test_samples_are_replaced_whatever_the_order(cache: cs.Cache, order: Any) -> None:
    fill(cache, closure(0), 50, order=order, shard_size="20KB")
    fill(cache, closure(100), 50, order=order, shard_size="20KB")
    assert cache.status().outdated_samples == 0


@pytest.fixture(scope="module")
def attach(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], None]]:
    """Attach to a running worker that has the transform `Compose(ALL(1))`; a difference is told at once."""
    source = [{"x": 1}]
    with (
        cs.Cache(tmp_path_factory.mktemp("attached") / "cache", size_limit="50MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1, transform=all_kinds()) as worker,
    ):
        assert worker.wait(DEADLINE_S)
        yield lambda transform: cs.start_worker(cache, source, transform=transform).close()


KINDS: dict[str, Callable[[Any], Any]] = {
    "partial": lambda k: functools.partial(add, k=k),
    "closure": closure,
    "object": Add,
    "default": with_default,
    "decorated": decorated,
    "nested": lambda k: Compose(Compose(closure(k))),
    "method": lambda k: Add(k).__call__,
    "list": lambda k: Add([k, {"a": k}]),
    "set": lambda k: Add({"a", "b", "c", str(k)}),
    "objects": lambda k: Add([Add(k), {Add: k}]),
    "array": lambda k: Add(np.arange(5) + k),
    "strings": lambda k: Add(np.array(["a", str(k)], object)),
    "tensor": lambda k: Add(torch.full((3,), k, dtype=torch.bfloat16)),
    "module": lambda k: Add(linear(k)),
    "pattern": lambda k: Add(re.compile(f"{k}x")),
}


def linear(k: float) -> Any:
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(k)
        layer.bias.fill_(k)
    return layer


def all_kinds(changed: str = "", k: int = 2) -> Any:
    made = [kind(k if name == changed else 1) for name, kind in KINDS.items()]
    unseeded = [np.random.default_rng(), random.Random(), torch.Generator()]
    return keep_first(*made, uses_globals, Add(unseeded))


def keep_first(*others: Any) -> Callable[[Any], Any]:
    def transform(sample: Any) -> Any:
        return sample if others else None

    return transform


@pytest.mark.parametrize("kind", KINDS)
def test_another_bound_value_is_told(attach: Callable[[Any], None], warned: Warned, kind: str) -> None:
    attach(all_kinds(kind))
    assert any("the transform has changed" in warning for warning in warned())


def test_a_global_that_it_uses_is_told_and_others_are_not(
    attach: Callable[[Any], None], warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OPTIONS, "epochs", 90)
    attach(all_kinds())
    assert warned() == [], "only the attribute that is used counts"
    monkeypatch.setattr(OPTIONS, "size", 2)
    attach(all_kinds())
    assert len(warned()) == 2, "the worker goes on with the other transform, and the samples are of that"
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "SCALE", [2.0])
    attach(all_kinds())
    assert warned()


@pytest.mark.e2e
def test_an_unchanged_transform_is_not_told_in_this_process_and_in_others(
    attach: Callable[[Any], None], warned: Warned, cache: cs.Cache
) -> None:
    attach(all_kinds())
    assert warned() == []
    script = (
        "import sys, cachestream as cs; from tests.contract.test_changed_transform import *; "
        "fill(cs.Cache(sys.argv[1]), all_kinds())"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script, cache.path],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "transform" not in done.stderr
    assert cache.num_samples == 20


HELPER = '''
"""Words."""
import math
FACTOR = 3
def scale(x):
    "Words."
    return x * FACTOR + math.pi
def other(x):
    return x
'''


@pytest.mark.parametrize("inside", [False, True], ids=["imported at the top", "imported inside"])
@pytest.mark.parametrize(
    ("before", "after", "is_told"),
    [
        ("FACTOR = 3", "FACTOR = 4", True),
        ("+ math.pi", "- math.pi", True),
        ("def scale", "# No.\ndef scale", False),
    ],
)
def test_an_edited_helper_module_is_told_and_an_edited_comment_is_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: cs.Cache,
    warned: Warned,
    before: str,
    after: str,
    is_told: bool,
    inside: bool,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    # Byte code is told from its source by seconds and sizes, which are those of the edited one.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    line = "import helper_of_test"
    (tmp_path / "of_test.py").write_text(
        f"{'' if inside else line}\ndef transform(sample):\n    {line if inside else 'pass'}\n"
        "    return {'x': helper_of_test.scale(sample['x'])}\n"
    )

    def loaded(helper: str) -> Any:
        (tmp_path / "helper_of_test.py").write_text(helper)
        for name in ("helper_of_test", "of_test"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("of_test").transform

    try:
        with cs.start_worker(cache, [{"x": 1}], num_workers=1, transform=loaded(HELPER)) as worker:
            assert worker.wait(DEADLINE_S)
            cs.start_worker(cache, [{"x": 1}], transform=loaded(HELPER.replace(before, after))).close()
    finally:
        for name in ("helper_of_test", "of_test"):
            sys.modules.pop(name, None)
    assert bool(warned()) == is_told


def test_samples_that_are_skipped_for_other_fields_are_explained_by_the_transform(
    cache: cs.Cache, warned: Warned
) -> None:
    fill(cache, None, 200, shard_size="20KB")
    cache.snapshot().close()
    cache.evict(to=cache.size_bytes - 100_000)
    warned()
    fill(cache, lambda sample: {"y": sample["x"]}, 200, shard_size="20KB", on_change="keep")
    told = [warning for warning in warned() if "skipped" in warning]
    assert told
    assert "the transform has changed" in told[-1]
    assert "fields differ" in told[-1]


def test_a_field_of_several_shapes_is_explained_by_the_transform(cache: cs.Cache, warned: Warned) -> None:
    fill(cache, None, 200, shard_size="20KB")
    cache.snapshot().close()
    cache.evict(to=cache.size_bytes - 100_000)
    warned()
    fill(cache, lambda sample: {"x": sample["x"][:500]}, 200, shard_size="20KB", on_change="keep")
    told = [warning for warning in warned() if "one shape in some shards" in warning]
    assert told
    assert "['x']" in told[0]
    assert "the transform has changed" in told[0]


def test_the_shards_name_the_transform_without_its_values(cache: cs.Cache) -> None:
    fill(cache, keep_first("a-secret-token"))
    (shard,) = Path(cache.path, "shards").rglob("*.safetensors")
    length = int.from_bytes(shard.read_bytes()[:8], "little")
    described = json.loads(shard.read_bytes()[8 : 8 + length])["__metadata__"]
    assert re.fullmatch(r"python 3\.\d+:[0-9a-f]{16}", json.loads(described["fill"])["transform"])
    assert b"a-secret-token" not in shard.read_bytes()


class Torn:
    """A value that answers any look at it with an error, as proxies outside of their context do."""

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


@pytest.mark.e2e
def test_a_transform_that_holds_what_cannot_be_compared_is_used_all_the_same(cache: cs.Cache) -> None:
    torn = Torn()
    fill(cache, lambda sample: [sample, torn][0])
    assert cache.num_samples == 20
