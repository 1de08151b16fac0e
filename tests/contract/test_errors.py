"""The tree of errors: one class for each reaction, which pickles, and whose message says what, where and what next."""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, numbered

# Class → its base of ours, and the built-in one that it is as well.
TREE: Final[dict[type[Exception], tuple[type[Exception], type[Exception]]]] = {
    cs.ConfigError: (cs.CacheStreamError, ValueError),
    cs.SourceError: (cs.CacheStreamError, Exception),
    cs.SampleError: (cs.SourceError, Exception),
    cs.SourceUnavailableError: (cs.SourceError, Exception),
    cs.CacheError: (cs.CacheStreamError, Exception),
    cs.CorruptShardError: (cs.CacheError, Exception),
    cs.CacheFullError: (cs.CacheError, Exception),
    cs.CacheLockedError: (cs.CacheError, Exception),
    cs.CacheVersionError: (cs.CacheError, Exception),
    cs.SchemaMismatchError: (cs.CacheError, Exception),
    cs.WorkerError: (cs.CacheStreamError, Exception),
    cs.WorkerTimeoutError: (cs.WorkerError, TimeoutError),
    cs.EpochError: (cs.CacheStreamError, Exception),
    cs.NotEnoughSamplesError: (cs.EpochError, TimeoutError),
    cs.RankMismatchError: (cs.EpochError, Exception),
}


def test_the_tree_is_the_documented_one_and_is_public() -> None:
    public = {getattr(cs, name) for name in cs.__all__ if name.endswith("Error")}
    assert public == {cs.CacheStreamError, *TREE}
    built_in = {error: {ValueError, TimeoutError, OSError} & set(error.__mro__) for error in TREE}
    for error, (base, other) in TREE.items():
        assert next(one for one in error.__mro__[1:] if one in public) is base
        assert issubclass(error, other)
        assert built_in[error] == (
            {other} & {ValueError, TimeoutError} | ({OSError} if other is TimeoutError else set())
        )
    assert cs.CacheStreamError.__bases__ == (Exception,)


@pytest.mark.parametrize("error", [cs.CacheStreamError, *TREE])
def test_an_error_is_the_same_after_a_pickle_and_a_copy(error: type[Exception]) -> None:
    raised = error("/scratch/train is full; raise the limit")
    for again in (pickle.loads(pickle.dumps(raised)), copy.copy(raised)):
        assert type(again) is error
        assert str(again) == str(raised) == "/scratch/train is full; raise the limit"
        assert again.args == raised.args


def test_a_worker_error_carries_the_traceback_of_the_child() -> None:
    for error in (cs.WorkerError, cs.WorkerTimeoutError):
        raised = pickle.loads(pickle.dumps(error("it ended", "Traceback …\nZeroDivisionError: 1 / 0\n")))
        assert raised.remote_traceback == "Traceback …\nZeroDivisionError: 1 / 0\n"
        assert str(raised) == "it ended\n\nThe worker's traceback:\nTraceback …\nZeroDivisionError: 1 / 0"
    lost = cs.SampleError("a.tar breaks off")
    assert lost.lost == 1
    lost.lost = 7
    assert pickle.loads(pickle.dumps(lost)).lost == 7


def test_a_failure_in_the_background_comes_home_with_its_traceback_and_a_deadline_is_another_error(
    tmp_path: Path,
) -> None:
    here = os.getpid()

    def broken_there(_progress: object) -> list[int]:
        return [1 // (os.getpid() == here)] * 4

    def slow(rng: np.random.Generator) -> dict[str, Any]:
        time.sleep(1)
        return {"x": rng.random()}

    with cs.Cache(tmp_path / "c", "4MB", min_free=0) as cache:
        with cs.start_worker(cache, slow, num_workers=1) as worker:
            with pytest.raises(cs.WorkerTimeoutError, match=r"0\.05 s"):
                worker.wait(timeout_s=0.05)
            assert worker.is_alive()
        with (
            pytest.raises(cs.WorkerError, match="ZeroDivisionError") as caught,
            cs.start_worker(cache, numbered(4), order=broken_there, num_workers=1) as worker,
        ):
            worker.wait(timeout_s=120)
        assert not isinstance(caught.value, cs.WorkerTimeoutError)
        assert "in broken_there" in caught.value.remote_traceback


# --- common mistakes: what a user does, the class, and what the message must say, in this order: what, where, what next


def _other_source(cache: cs.Cache, _: Path) -> object:
    return cs.start_worker(cache, [{"y": 1}] * 3, num_workers=1)


def _leased(cache: cs.Cache, _: Path) -> object:
    with cache.snapshot():
        cache.clear()
    return None


def _unpicklable(cache: cs.Cache, path: Path) -> object:
    with open(path / "notes", "w", encoding="utf-8") as file:
        return cs.start_worker(cache, numbered(300), transform=lambda s: file.write("x") and s)


def _too_large_a_batch(cache: cs.Cache, _: Path) -> object:
    with cs.EpochLoader(cache, 1000) as loader:
        return next(iter(loader))


def _mistyped_field(cache: cs.Cache, _: Path) -> object:
    with cs.EpochLoader(cache, 8, columns=["nmber"]) as loader:
        return next(iter(loader))


MISTAKES: Final[dict[str, tuple[Callable[[cs.Cache, Path], object], type[Exception], str]]] = {
    "a limit without a number": (
        lambda c, _: cs.Cache(c.path, "lots"),
        cs.ConfigError,
        "size_limit='lots'.*'200GB'",
    ),
    "a batch size of none": (lambda c, _: cs.EpochLoader(c, 0), cs.ConfigError, "batch_size=0.*1 or more"),
    "a peer's keyword": (
        lambda c, _: cs.EpochLoader(c, 8, persistent_workers=True),  # type: ignore[call-arg]
        cs.ConfigError,
        r"persistent_workers.*start_worker\(num_workers=\)",
    ),
    "a misspelt keyword": (
        lambda c, _: cs.EpochLoader(c, 8, shufle=True),  # type: ignore[call-arg]
        cs.ConfigError,
        "'shufle'; do you mean 'shuffle'",
    ),
    "a batch larger than the cache": (
        _too_large_a_batch,
        cs.NotEnoughSamplesError,
        "holds 300 samples.*1000.*smaller batch_size",
    ),
    "a field that is not there": (
        _mistyped_field,
        cs.ConfigError,
        "columns= names 'nmber', and the samples have.*number",
    ),
    "a path that is not there": (
        lambda _, path: cs.open_source(path / "missing"),
        cs.SourceError,
        "missing: no such file or folder; check the path",
    ),
    "an unknown scheme": (lambda _, __: cs.open_source("nowhere://b/x"), cs.ConfigError, "nowhere://.*s3://"),
    "an unknown format": (
        lambda _, path: cs.open_source(path, format="zip"),
        cs.ConfigError,
        "format='zip': give one of.*mds",
    ),
    "an option of another source": (
        lambda c, _: cs.open_source(Path(c.path, "*.json"), colour="red"),
        cs.ConfigError,
        "no argument 'colour'",
    ),
    "another source": (
        _other_source,
        cs.ConfigError,
        "filled from another source.*use another directory, or.*'cachestream clear CACHE'",
    ),
    "an order that is none": (
        lambda c, _: cs.start_worker(c, numbered(300), order="backwards"),
        cs.ConfigError,
        "order='backwards': choose 'shuffle' or 'sequential'",
    ),
    "a transform that cannot travel": (
        _unpicklable,
        cs.ConfigError,
        "the transform cannot be sent.*open files.*inside it",
    ),
    "clearing what is in use": (_leased, cs.CacheError, "leased by epochs in use; close them"),
    "waiting for what will not come": (
        lambda c, _: c.wait(301),
        cs.NotEnoughSamplesError,
        "holds 300 samples, 301 are needed.*fewer samples.*or give more data",
    ),
    "metrics of nothing": (lambda _, __: cs.metrics(), cs.ConfigError, "give a loader, or cache="),
    "a trace into nowhere": (
        lambda _, path: cs.trace(path / "no" / "t.json"),
        cs.ConfigError,
        "t.json: the trace cannot be written there",
    ),
    "a state of something else": (
        lambda c, _: cs.EpochLoader(c, 8).load_state_dict({"epoch": 3}),
        cs.ConfigError,
        r"no state of an EpochLoader.*pass what state_dict\(\) gave",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_common_mistake_is_told_with_what_helps(mistake: str, cache: cs.Cache, tmp_path: Path) -> None:
    make, error, words = MISTAKES[mistake]
    with pytest.raises(cs.CacheStreamError, match=words) as caught:
        make(cache, tmp_path)
    assert type(caught.value) is error
    assert len(str(caught.value).splitlines()) == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))
    assert cache.num_samples == NUM_SAMPLES
