"""Mixtures: after every batch each source has its share exactly, on all ranks together and after any resume."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cachestream as cs
from cachestream import Cache, ConfigError, EpochLoader, NotEnoughSamplesError
from cachestream.storage.telemetry import SourceStats, read_loaders
from cachestream.training.mixture import apportion, choose
from tests.support.caches import add_shard
from tests.training.conftest import NewCache, NewJob
from tests.worker.support import wait_until

Floats = npt.NDArray[np.float64]
NewMix = Callable[..., Cache]


@pytest.fixture
def new_mix(new_cache: NewCache) -> NewMix:
    """Make caches as workers fill them from a mix: `new_mix(a=30, b=10)`, in shards of up to 8 samples."""

    def new(**counts: int) -> Cache:
        cache = new_cache()
        with cache.catalogue.transaction() as tables:
            tables.set_meta("source", f"mix:{','.join(counts)}:0")
        keys = [f"{name}/{number}" for name, count in counts.items() for number in range(count)]
        keys = np.random.default_rng(0).permutation(keys).tolist()
        for start in range(0, len(keys), 8):
            add_shard(cache, [(key, {"x": np.float32(0)}) for key in keys[start : start + 8]])
        return cache

    return new


def sources_of(batch: Any) -> list[str]:
    return [key.partition("/")[0].partition(".")[0] for key in batch["__key__"]]


def keys_of(batches: Iterable[Any]) -> list[list[str]]:
    return [batch["__key__"] for batch in batches]


def check_exact(batches: list[list[str]], names: str, rows: Any, within: float = 1.0) -> None:
    """Check the counts of the sources `names` after each of `batches`, lists of keys, for weights `rows`."""
    weights = np.array(list(islice(rows, len(batches))), np.float64)
    shares = weights / weights.sum(axis=1, keepdims=True)
    due, drawn = np.zeros(len(names)), np.zeros(len(names))
    for batch, share in zip(batches, shares, strict=True):
        due += len(batch) * share
        counted = Counter(key[0] for key in batch)
        drawn += [counted[name] for name in names]
        assert (np.abs(drawn - due) < within).all(), (drawn, due)


# --- the pure functions


@st.composite
def weights_by_step(draw: st.DrawFn) -> Floats:
    sources, steps = draw(st.integers(1, 7)), draw(st.integers(1, 30))
    weight = st.sampled_from([0.0, 0.0, 1.0]) | st.floats(0, 1e9)
    row = st.lists(weight, min_size=sources, max_size=sources).filter(any)
    return np.array(draw(st.lists(row, min_size=steps, max_size=steps)))


@pytest.mark.e2e
@settings(max_examples=300)
@given(weights_by_step(), st.integers(1, 12), st.integers(0, 400))
def test_after_every_batch_each_source_is_within_the_bound_of_its_share(
    weights: Floats, batch: int, count: int
) -> None:
    drawn = apportion(weights, batch, count)
    assert len(drawn) == count
    steps, sources = count // batch, weights.shape[1]
    rows = weights[np.minimum(np.arange(steps), len(weights) - 1)]
    due = np.cumsum(batch * rows / rows.sum(axis=1, keepdims=True), axis=0)
    had = [np.bincount(drawn[: (step + 1) * batch], minlength=sources) for step in range(steps)]
    bound = 1 - 1 / max(2, 2 * sources - 2)
    assert (np.abs(np.array(had).reshape(due.shape) - due) <= bound + 1e-5).all()


def test_megatrons_weights_need_not_sum_to_one_and_equal_ones_alternate() -> None:
    assert (
        apportion(np.array([[30.0, 10.0]]), 4, 12).tolist()
        == apportion(np.array([[0.75, 0.25]]), 4, 12).tolist()
    )
    assert apportion(np.array([[2.0, 2.0]]), 6, 6).tolist() in ([0, 1] * 3, [1, 0] * 3)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 100), st.integers(0, 2**64 - 1))
def test_all_samples_of_a_source_come_before_one_comes_again(
    sources: list[int], count: int, key: int
) -> None:
    have = np.array(sources, np.int16)
    positions = have[np.random.default_rng(key).integers(0, len(have), count)]
    order = choose(have, positions, key)
    assert (have[order] == positions).all()
    assert choose(have, positions, key).tolist() == order.tolist()
    for number in set(sources):
        mine, size = order[positions == number].tolist(), sources.count(number)
        for start in range(0, len(mine), size):
            again = mine[start : start + size]
            assert len(set(again)) == len(again)


# --- in the loader


@pytest.mark.e2e
def test_weights_that_anneal_hold_after_every_batch_and_a_source_may_have_none_for_a_while(
    new_mix: NewMix,
) -> None:
    def rows(step: int) -> dict[str, float]:
        return {"a": 3.0, "b": 0.0 if step < 5 else step / 4, "c": 1.0}

    cache = new_mix(a=40, b=24, c=16)
    with EpochLoader(cache, 5, mixture=rows, with_keys=True) as loader:
        epochs = [keys_of(loader), keys_of(loader)]
    for number, batches in enumerate(epochs):
        assert len(batches) == 16
        check_exact(batches, "abc", ([*rows(16 * number + step).values()] for step in range(16)))
    assert not any(key.startswith("b") for batch in epochs[0][:5] for key in batch)


def test_a_small_source_is_repeated_in_new_orders_as_energons_blend_does(new_mix: NewMix) -> None:
    cache = new_mix(a=48, b=8)
    with EpochLoader(cache, 8, mixture=[1, 1], with_keys=True) as loader:
        batches = keys_of(loader)
        mine = [key for batch in batches for key in batch if key.startswith("b")]
        turns = [mine[start : start + 8] for start in range(0, 24, 8)]
        assert [len(set(turn)) for turn in turns] == [8] * 3
        assert len(set(map(tuple, turns))) > 1
        assert loader.stats.mixture == {"a": SourceStats(28, 0.5, 0), "b": SourceStats(28, 0.5, 20)}
        next(iter(loader))
        assert loader.stats.mixture["b"] == SourceStats(32, 0.5, 20)
        wait_until(lambda: bool(read_loaders(cache.directory)[0].mixture), "the first batch is reported")
        (report,) = read_loaders(cache.directory)
        assert report.mixture.keys() == {"a", "b"}
        assert isinstance(report.mixture["b"], SourceStats)
        assert cs.metrics(loader)["cachestream/share_of_b"] == 0.5
        assert "a 50.0%, b 50.0%" in loader._repr_html_()


def by_step(step: int) -> list[float]:
    return [100 - step, step]


@pytest.mark.e2e
def test_resumed_at_every_step_the_batches_are_the_same_and_the_weights_go_on(new_mix: NewMix) -> None:
    cache = new_mix(a=20, b=28)
    options: dict[str, Any] = {"mixture": by_step, "with_keys": True}
    states, batches = [], []
    with EpochLoader(cache, 4, **options) as loader:
        for _ in range(2):
            states.append(loader.state_dict())
            for batch in loader:
                batches.append(batch["__key__"])
                states.append(loader.state_dict())
    assert [state["first_step"] for state in states] == [0] * 12 + [12] * 13 + [24]
    seen = 0
    for state in states[:-1]:
        with EpochLoader(cache, 4, **options) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert loader.state_dict() == state
            rest = keys_of(loader)
            seen = 12 * state["epoch"] + state["batch"]
            assert rest == batches[seen : seen + len(rest)]
            if state["epoch"] == 0 and state["batch"] in (0, 7):
                assert keys_of(loader) == batches[12:]
    assert seen == 23


@pytest.mark.e2e
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_schedule_is_asked_for_the_steps_of_the_epoch_and_no_others(
    drop_last: bool, new_mix: NewMix
) -> None:
    cache, asked = new_mix(a=20, b=27), []

    def schedule(step: int) -> list[int]:
        asked.append(step)
        return [1, 1]

    options: dict[str, Any] = {"mixture": schedule, "drop_last": drop_last}
    steps = 11 if drop_last else 12
    with EpochLoader(cache, 4, **options) as loader:
        assert len(loader) == steps
        assert asked[:steps] == list(range(steps))
        batches = iter(loader)
        for _ in range(7):
            next(batches)
        state = loader.state_dict()
    asked.clear()
    with EpochLoader(cache, 4, **options) as loader:
        loader.load_state_dict(state)
        assert len(loader) == steps
        assert asked[: steps - 7] == list(range(7, steps))
        assert asked[steps - 7 : steps - 6] in ([], [steps])  # of the next epoch
    asked.clear()
    with EpochLoader(cache, 4, **options, epoch_size=20) as loader:
        assert len(loader) == 5
        assert asked[:5] == list(range(5))
        assert asked[5:6] in ([], [5])


@pytest.mark.e2e
def test_the_step_goes_on_over_jumps_breaks_and_a_close(new_mix: NewMix) -> None:
    asked: list[int] = []

    def weights(step: int) -> list[int]:
        asked.append(step)
        return [1, 1]

    def asked_first(state: Any = None, epoch: int | None = None) -> int:
        with EpochLoader(cache, 4, mixture=weights) as loader:
            if state is not None:
                loader.load_state_dict(state)
            if epoch is not None:
                loader.set_epoch(epoch)
            asked.clear()
            len(loader)
            return asked[0]

    cache = new_mix(a=20, b=20)
    with EpochLoader(cache, 4, mixture=weights) as loader:
        list(loader)
        assert loader.state_dict()["first_step"] == 10
        loader.set_epoch(7)
        assert loader.state_dict()["first_step"] == 10
        next(iter(loader))
        loader.set_epoch(20)  # the epoch that was left counts as a whole
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    assert (state["epoch"], state["batch"], state["first_step"]) == (20, 1, 20)
    assert loader.state_dict() == state
    assert asked_first(state) == 21
    assert asked_first({**state, "batch": 0, "segment": None}, epoch=3) == 20
    assert asked_first() == 0
    with EpochLoader(cache, 4) as loader:
        assert "first_step" not in loader.state_dict()


def test_an_epoch_longer_than_the_cache_is_exact_in_every_pass(new_mix: NewMix) -> None:
    cache = new_mix(a=12, b=12)
    with EpochLoader(cache, 4, mixture=by_step, with_keys=True, epoch_size=60) as loader:
        batches = keys_of(loader)
        assert loader.state_dict()["first_step"] == 15
    for start in range(0, 15, 6):
        check_exact(batches[start : start + 6], "ab", map(by_step, range(start, 15)))


@pytest.mark.e2e
def test_what_is_held_out_is_no_part_of_a_mixture(new_mix: NewMix) -> None:
    cache = new_mix(a=60, b=60)
    with EpochLoader(cache, 4, mixture=[1, 3], with_keys=True, split="held-out", holdout=0.3) as loader:
        held_out = keys_of(loader)
    with EpochLoader(cache, 4, mixture=[1, 3], with_keys=True, split="train") as loader:
        train = keys_of(loader)
    check_exact(held_out, "ab", iter([[1, 3]] * 99))
    check_exact(train, "ab", iter([[1, 3]] * 99))
    assert not {key for batch in held_out for key in batch} & {key for batch in train for key in batch}


# --- ranks


@pytest.mark.e2e
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_together_are_exact_by_what_rank_0_says(
    ranks: int, new_mix: NewMix, new_job: NewJob
) -> None:
    cache = new_mix(a=50, b=46)

    def work(rank: int, make: Any) -> tuple[list[list[str]], Any]:
        said = by_step if rank == 0 else (lambda step: [0, 1 + 0 * step])  # as losses differ on ranks
        loader = make(cache, 4, mixture=said, with_keys=True)
        batches = [*keys_of(loader), *keys_of(loader)]
        return batches, {name: figures.drawn for name, figures in loader.stats.mixture.items()}

    results = new_job(ranks).run(work)
    together = [list(chain(*parts)) for parts in zip(*(batches for batches, _ in results), strict=True)]
    half = len(together) // 2
    assert len(together) == 2 * (96 // (4 * ranks))
    check_exact(together[:half], "ab", map(by_step, range(half)))
    check_exact(together[half:], "ab", map(by_step, range(half, 2 * half)))
    drawn = Counter(key[0] for batch in together for key in batch)
    assert [figures for _, figures in results] == [drawn] * ranks


@pytest.mark.e2e
def test_caches_of_their_own_are_exact_each_by_the_weights_of_rank_0(
    new_mix: NewMix, new_job: NewJob
) -> None:
    caches = [new_mix(a=30, b=10), new_mix(a=10, b=38)]

    def work(rank: int, make: Any) -> list[list[str]]:
        return keys_of(make(caches[rank], 4, mixture=by_step if rank == 0 else [1, 0], with_keys=True))

    for batches in new_job(2).run(work):
        assert len(batches) == 10
        check_exact(batches, "ab", map(by_step, range(10)))


# --- what is missing, and what is wrong


def test_a_source_without_a_cached_sample_leaves_its_share_to_the_others(
    new_mix: NewMix, caplog: pytest.LogCaptureFixture
) -> None:
    cache = new_mix(a=16, b=0, c=16)
    with caplog.at_level(logging.WARNING), EpochLoader(cache, 4, mixture=[1, 5, 3], with_keys=True) as loader:
        check_exact(keys_of(loader), "ac", iter([[1, 3]] * 99))
    assert "no sample of b is cached; others come instead" in caplog.text
    late = pytest.raises(NotEnoughSamplesError, match="asks for b alone, of which no sample is cached: wait")
    with EpochLoader(cache, 4, mixture=lambda step: [step, 1, 0]) as loader, late:
        next(iter(loader))


def test_a_damaged_shard_is_left_out(new_mix: NewMix) -> None:
    cache = new_mix(a=24, b=24)
    path = sorted(Path(cache.path, "shards").glob("*.safetensors"))[2]
    data = bytearray(path.read_bytes())
    data[data.index(b"/") + 1] ^= 3
    path.write_bytes(data)
    with EpochLoader(cache, 4, mixture=[1, 1], with_keys=True) as loader:
        check_exact(keys_of(loader), "ab", iter([[1, 1]] * 99))


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ([-1.0, 2.0], "0 or more"),
        ([0, 0], "not all 0"),
        ([float("nan"), 1], "finite"),
        ({"a": float("inf"), "b": 1}, "finite"),
        ([], "for each source"),
        (3, "for each source"),
        ("half", "could not convert"),
        ({"a": None}, "must be a real number|not 'NoneType'|finite"),
        (lambda: [1], r"give fn\(step\), or fn\(epoch\)"),
        (lambda step, loss: [step, loss], r"give fn\(step\), or fn\(epoch\)"),
        (max, r"give fn\(step\), or fn\(epoch\)"),
    ],
)
def test_what_can_be_no_mixture_is_refused_at_once(mixture: Any, message: str, new_mix: NewMix) -> None:
    with pytest.raises(ConfigError, match=message):
        EpochLoader(new_mix(a=8, b=8), 4, mixture=mixture)


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ([1, 1, 1], r"mixture gives \[1, 1, 1\]: give a number for each source \(a, b\)"),
        ({"a": 1}, "0 for one that is not drawn"),
        ({"a": 1, "code": 1}, r"\(a, b\)"),
        (lambda step: [1, step - 3], r"mixture\(step=0\) gives \[1, -3\]"),
        (lambda epoch: {"a": epoch}, r"mixture\(epoch=0\) gives {'a': 0}"),
        (lambda step: None if step < 2 else [1, 1], r"mixture\(step=0\) gives None"),
    ],
)
def test_what_does_not_fit_the_sources_is_refused_with_their_names(
    mixture: Any, message: str, new_mix: NewMix
) -> None:
    with (
        EpochLoader(new_mix(a=8, b=8), 4, mixture=mixture) as loader,
        pytest.raises(ConfigError, match=message),
    ):
        next(iter(loader))


def test_the_users_own_errors_come_as_they_are(new_mix: NewMix) -> None:
    def wrong(step: int) -> list[int]:
        raise KeyError(step)

    with EpochLoader(new_mix(a=8, b=8), 4, mixture=wrong) as loader, pytest.raises(KeyError):
        next(iter(loader))


def test_a_recorded_mixture_is_replayed_without_it(new_mix: NewMix, tmp_path: Path) -> None:
    cache = new_mix(a=16, b=16)
    with EpochLoader(cache, 4, mixture=by_step, with_keys=True, record=tmp_path / "run") as loader:
        batches = keys_of(loader)
    manifest = json.loads((tmp_path / "run" / "epoch-000000.json").read_text())
    assert '"sampler": "mixture"' in json.dumps(manifest)
    with EpochLoader(cache, 4, replay=tmp_path / "run", with_keys=True) as loader:
        assert keys_of(loader) == batches
    with pytest.raises(ConfigError, match="mixture= and replay= do not go together"):
        EpochLoader(cache, 4, mixture=by_step, replay=tmp_path / "run")


def test_a_cache_of_one_source_has_no_mixture(new_cache: NewCache) -> None:
    with (
        EpochLoader(new_cache(2, 8), 4, mixture=[1]) as loader,
        pytest.raises(ConfigError, match=r"cs\.mix\("),
    ):
        next(iter(loader))


@pytest.mark.e2e
def test_a_curriculum_of_the_same_weights_lets_the_filling_follow_the_plan(tmp_path: Path) -> None:
    mixed = cs.mix({"a": ([{"x": n} for n in range(200)], 1), "b": ([{"x": n} for n in range(200)], 1)})
    source_of = np.array([mixed.locate(unit)[0] for unit in range(400)])

    def follow(progress: float) -> Floats:
        return np.where(source_of == 0, 1.0, 0.1 if progress < 0.25 else 10.0)

    with cs.Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        with cs.start_worker(cache, mixed, num_workers=1, concurrency=1, order=follow) as worker:
            assert worker.wait(60)
        with EpochLoader(cache, 100, shuffle=False, with_keys=True) as loader:  # as they arrived
            first, second, *_ = [Counter(sources_of(batch)) for batch in loader]
        assert cache.num_samples == 400
    assert first["a"] > 75
    assert second["b"] > 75


@pytest.mark.e2e
def test_a_worker_fills_from_named_sources_and_the_loader_draws_by_name(tmp_path: Path) -> None:
    web = [{"x": np.full(16, n, np.float32)} for n in range(90)]
    code = [{"x": np.full(16, -1 - n, np.float32)} for n in range(10)]
    mixed = cs.mix({"web": (web, 3), "code": (code, 1)})
    with cs.Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        with cs.start_worker(cache, mixed, num_workers=2) as worker:
            assert worker.wait(60)
        assert cache.num_samples == 120  # code comes three times, as "code.1/…" and "code.2/…"
        with EpochLoader(cache, 6, mixture={"web": 1, "code": 2}, with_keys=True) as loader:
            for batch in loader:
                assert Counter(sources_of(batch)) == {"web": 2, "code": 4}
                assert [value < 0 for value in batch["x"][:, 0].tolist()] == [
                    source == "code" for source in sources_of(batch)
                ]
            assert loader.stats.mixture == {
                "web": SourceStats(40, 1 / 3, 0),
                "code": SourceStats(80, 2 / 3, 50),
            }
