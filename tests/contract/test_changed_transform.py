"""A changed transform is told at every start for as long as samples of another one are cached, and named where it is the cause."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import os
import random
import re
import subprocess
import sys
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
    shards = list(Path(cache.path, "shards").rglob("*.safetensors"))
    assert shards
    for shard in shards:
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
