"""Options of `EpochLoader`: each of them makes the difference that it promises, and what cannot work is refused in words."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, NUM_VARIOUS, shown, various

EVERY: Final = list(range(NUM_SAMPLES))


def numbers(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch["number"].tolist()]


def epochs(cache: cs.Cache, count: int = 1, batch_size: int = 10, **options: Any) -> list[list[int]]:
    """The numbers of each epoch of a new loader."""
    with cs.EpochLoader(cache, batch_size, **options) as loader:
        return [numbers(loader) for _ in range(count)]


# --- what is drawn, and in which order


def test_shuffle_draws_every_sample_once_in_an_order_of_seed_and_epoch(cache: cs.Cache) -> None:
    first, second = epochs(cache, 2, seed=5)
    assert sorted(first) == sorted(second) == EVERY
    assert first != second
    assert epochs(cache, 2, seed=5, prefetch=1, batch_size=30) == [first, second]
    assert epochs(cache, seed=6) != [first]
    in_order = epochs(cache, 2, shuffle=False)
    with cache.snapshot() as dataset:
        assert in_order == [dataset[:]["number"].tolist()] * 2


def test_an_epoch_size_below_what_is_cached_takes_the_least_used_and_one_above_goes_on(
    cache: cs.Cache,
) -> None:
    first, second = epochs(cache, 2, epoch_size=100)
    assert len(set(first)) == len(set(second)) == 100
    assert len(set(first) & set(second)) < 16, "of one shard at most"
    (long,) = epochs(cache, epoch_size=750)
    assert len(long) == 750
    assert sorted(long[:NUM_SAMPLES]) == sorted(long[NUM_SAMPLES : 2 * NUM_SAMPLES]) == EVERY
    assert set(Counter(long).values()) == {2, 3}


@pytest.mark.parametrize("options", [{}, {"epoch_size": 95}, {"sampler": range(95)}], ids=shown)
def test_drop_last_leaves_out_the_batch_that_is_not_whole(options: dict[str, Any], cache: cs.Cache) -> None:
    size = 95 if options else NUM_SAMPLES
    with cs.EpochLoader(cache, 20 if options else 40, **options) as loader:
        assert [len(batch["x"]) for batch in loader] == [20] * 4 if options else [40] * 7
    with cs.EpochLoader(cache, 40, drop_last=False, **options) as loader:
        sizes = [len(batch["x"]) for batch in loader]
        assert sizes == [40] * (size // 40) + [size % 40]
    with cs.EpochLoader(cache, size - 1, drop_last=False, **options) as loader:
        assert [len(batch["x"]) for batch in loader] == [size - 1, 1]


def test_min_samples_is_waited_for(cache: cs.Cache) -> None:
    words = rf"holds {NUM_SAMPLES} samples, {NUM_SAMPLES + 1} are needed"
    with pytest.raises(cs.NotEnoughSamplesError, match=words):
        epochs(cache, min_samples=NUM_SAMPLES + 1)
    assert sorted(*epochs(cache, min_samples=NUM_SAMPLES)) == EVERY


def test_turnover_is_the_share_of_a_full_cache_that_the_filling_may_replace_meanwhile(tmp_path: Path) -> None:
    def endless(rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.random(1024, np.float32)}

    pause, deadline = threading.Event(), time.monotonic() + 60
    with (
        cs.Cache(tmp_path / "c", "1.2MB", min_free=0) as cache,
        cs.start_worker(cache, endless, num_workers=1, shard_size="32KB"),
    ):
        while cache.status().fill_state != "full":
            assert time.monotonic() < deadline
            pause.wait(0.02)
        whole = cache.num_samples
        with cs.EpochLoader(cache, 4, turnover=0.0) as loader:  # a shard or two are left out all the same
            assert min(sum(len(batch["x"]) for batch in loader) for _ in range(5)) > 0.75 * whole
        with cs.EpochLoader(cache, 4, turnover=0.9) as loader:
            while sum(len(batch["x"]) for batch in loader) > 0.6 * whole:
                assert time.monotonic() < deadline


def test_a_sampler_is_torchs_or_a_function_of_the_dataset(cache: cs.Cache) -> None:
    def every_third(dataset: Any) -> Any:
        return np.flatnonzero(dataset[:]["number"].numpy() % 3 == 0)

    (drawn,) = epochs(cache, sampler=every_third)
    assert sorted(drawn) == EVERY[::3]
    first, second = epochs(cache, 2, sampler=RandomSampler)
    assert sorted(first) == sorted(second) == EVERY
    assert first != second
    assert epochs(cache, 2, sampler=RandomSampler) == [first, second]
    assert epochs(cache, sampler=RandomSampler, seed=1) != [first]


def test_weights_say_how_often_a_sample_comes_and_can_be_changed(cache: cs.Cache) -> None:
    weights = {str(n): 3.0 if n < 100 else 0.0 for n in EVERY}
    with cs.EpochLoader(cache, 10, weights=weights) as loader:
        batch = next(iter(loader))
        assert batch["__key__"] == [str(n) for n in batch["number"].tolist()]
        assert sorted(numbers(loader)) == sorted(3 * EVERY[:100])
    with cs.EpochLoader(cache, 10, weights=True) as loader:
        assert sorted(numbers(loader)) == EVERY
        loader.update_weights([str(n) for n in EVERY], torch.tensor([float(n % 2) for n in EVERY]))
        numbers(loader)  # may have been drawn before
        assert sorted(numbers(loader)) == sorted(2 * EVERY[1::2])
    with cs.EpochLoader(cache, 10) as loader, pytest.raises(cs.ConfigError, match="weights=True"):
        loader.update_weights(["1"], [1.0])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a cache of 600 samples of "a", from 0 on, and 200 of "b", from 1000 on."""
    path = tmp_path_factory.mktemp("mixed") / "cache"
    a, b = ([{"number": n} for n in range(first, first + size)] for first, size in ((0, 600), (1000, 200)))
    with (
        cs.Cache(path, "4MB", min_free=0) as cache,
        cs.start_worker(cache, cs.mix({"a": (a, 3), "b": (b, 1)}), num_workers=1) as worker,
    ):
        worker.wait(timeout_s=120)
    return path


def of_b(batches: Any) -> list[int]:
    """How many samples of each batch are of "b"."""
    return [sum(n >= 1000 for n in batch["number"].tolist()) for batch in batches]


def test_a_mixture_is_exact_after_every_batch_and_may_change_by_step_and_by_epoch(mixed: Path) -> None:
    with cs.Cache(mixed) as cache:
        with cs.EpochLoader(cache, 10, mixture={"a": 0.7, "b": 0.3}) as loader:
            assert of_b(loader) == [3] * 80
            figures = loader.stats.mixture["b"]
            assert (figures.drawn, figures.share, figures.repeated) == (240, 0.3, 40)
        with cs.EpochLoader(cache, 10, mixture=lambda epoch: [1 - epoch, epoch]) as loader:
            assert [of_b(loader), of_b(loader)] == [[0] * 80, [10] * 80]
        with cs.EpochLoader(cache, 10, mixture=lambda step: {"a": step < 100, "b": step >= 100}) as loader:
            assert [of_b(loader), of_b(loader)] == [[0] * 80, [0] * 20 + [10] * 60]


def test_locality_draws_each_window_out_of_long_runs(mixed: Path) -> None:
    """The share of a window's samples that come with the one that lies next to them."""

    def together(drawn: list[int]) -> float:
        windows = [{places[n] for n in drawn[start : start + 80]} for start in range(0, 800, 80)]
        return sum(place + 1 in window for window in windows for place in window) / 800

    with cs.Cache(mixed) as cache:
        with cache.snapshot() as dataset:
            places = {n: place for place, n in enumerate(dataset[:]["number"].tolist())}
        first, second = epochs(cache, 2, locality=80)
        assert sorted(first) == sorted(second) == sorted(places)
        assert first != second
        assert epochs(cache, locality=80, batch_size=16) == [first]
        assert together(first) > 0.5 > together(*epochs(cache))


def test_where_draws_the_samples_that_a_mask_selects_and_asks_once_for_each_shard(cache: cs.Cache) -> None:
    asked: list[int] = []

    def below_100(columns: cs.ShardColumns) -> Any:
        asked.append(columns.num_samples)
        return columns["number"] < 100

    first, second = epochs(cache, 2, where=below_100)
    assert sorted(first) == sorted(second) == EVERY[:100]
    assert sum(asked) == NUM_SAMPLES
    with pytest.raises(cs.NotEnoughSamplesError, match=rf"selects \(of {NUM_SAMPLES} in all\)"):
        epochs(cache, where=lambda columns: columns["number"] < 3)


def test_holdout_splits_the_samples_by_their_keys(cache: cs.Cache) -> None:
    (train,) = epochs(cache, split="train", holdout=0.2, drop_last=False)
    (held_out,) = epochs(cache, split="held-out", drop_last=False)
    assert sorted(train + held_out) == EVERY
    assert 30 < len(held_out) < 90
    assert sorted(*epochs(cache, holdout=0.2, drop_last=False)) == sorted(train)
    with pytest.raises(cs.ConfigError, match=r"holdout=0.1: .* holds out 0.2 of its samples"):
        epochs(cache, holdout=0.1)


def test_max_tokens_bounds_the_longest_of_a_batch_times_its_samples(kinds: cs.Cache) -> None:
    with cs.EpochLoader(kinds, 6, max_tokens={"tokens": 16}) as loader:
        length, batches = len(loader), list(loader)
    assert len(batches) == length
    assert sorted(numbers(batches)) == list(range(NUM_VARIOUS))
    for batch in batches:
        assert 1 <= len(batch["tokens"]) <= 6
        assert max(len(tokens) for tokens in batch["tokens"]) * len(batch["tokens"]) <= 16
    assert max(len(batch["tokens"]) for batch in batches) == 6
    assert len(batches) < NUM_VARIOUS / 2
    with pytest.raises(cs.ConfigError, match=r"longer, up to 7 tokens.*where=lambda columns"):
        epochs(kinds, max_tokens={"tokens": 6})


# --- how batches look


def test_columns_are_the_fields_of_a_batch_in_their_order(kinds: cs.Cache) -> None:
    with cs.EpochLoader(kinds, 4, columns=["text", "number"], with_keys=True) as loader:
        for batch in loader:
            assert list(batch) == ["text", "number", "__key__"]
            assert batch["text"] == [various(n)["text"] for n in batch["number"].tolist()]


@pytest.mark.parametrize("layout", ["padded", "nested"])
def test_ragged_is_the_form_of_what_varies(layout: Any, kinds: cs.Cache) -> None:
    with cs.EpochLoader(kinds, 4, ragged=layout) as loader:
        for batch in loader:
            lengths = [1 + n % 7 for n in batch["number"].tolist()]
            expected = [[n] * (1 + n % 7) for n in batch["number"].tolist()]
            if layout == "padded":
                assert isinstance(batch["tokens"], cs.Padded)
                values, found = batch["tokens"]
                assert values.shape == (4, max(lengths))
                assert found.tolist() == lengths
                assert batch["tokens"].mask.sum(1).tolist() == lengths
                padded = [tokens + [0] * (max(lengths) - len(tokens)) for tokens in expected]
                assert values.tolist() == padded
            else:
                assert batch["tokens"].layout == torch.jagged
                assert [row.tolist() for row in batch["tokens"].unbind()] == expected
            assert isinstance(batch["text"], list)


def test_ragged_by_field_names_texts_too(kinds: cs.Cache) -> None:
    with cs.EpochLoader(kinds, 4, ragged={"text": "padded", "data": "padded"}) as loader:
        for batch in loader:
            values, lengths = batch["text"]
            found = [bytes(row[:n].tolist()).decode() for row, n in zip(values, lengths, strict=True)]
            assert found == [f"no. {n}" for n in batch["number"].tolist()]
            assert batch["data"].values.dtype == torch.uint8
            assert isinstance(batch["tokens"], list)


def test_a_batch_transform_has_every_batch_and_a_generator_of_its_own(cache: cs.Cache) -> None:
    def jitter(batch: Any, generator: torch.Generator) -> Any:
        return batch | {"drawn": torch.rand(2, generator=generator)}

    def later(batch: Any, *, rng: Any = None) -> Any:
        return jitter(batch, rng)

    def drawn(transform: Any, seed: int = 0) -> list[float]:
        with cs.EpochLoader(cache, 60, batch_transform=transform, seed=seed) as loader:
            return [x for _ in range(2) for batch in loader for x in batch["drawn"].tolist()]

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = drawn(jitter)
    assert len(set(first)) == 20
    assert drawn(later) == first == drawn(jitter)
    assert not set(drawn(jitter, seed=1)) & set(first)
    assert torch.equal(torch.rand(1), expected), "the trainer's generator is where it was"
    with cs.EpochLoader(cache, 60, batch_transform=lambda batch: batch["number"] + 1) as loader:
        assert sorted(n for batch in loader for n in batch.tolist()) == list(range(1, NUM_SAMPLES + 1))
    with cs.EpochLoader(cache, 60, batch_transform=jitter) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    with cs.EpochLoader(cache, 60, batch_transform=jitter) as loader:
        loader.load_state_dict(state)
        assert [x for batch in loader for x in batch["drawn"].tolist()] == first[2:10]


@pytest.mark.parametrize("prefetch", [1, 5])
def test_prefetch_is_how_many_batches_are_made_ahead(prefetch: int, cache: cs.Cache) -> None:
    """Of 8 MB each: many small ones are made together."""
    made, taken, changed = 0, 0, threading.Condition()

    def count(batch: Any) -> Any:
        nonlocal made
        with changed:
            made += 1
            changed.notify_all()
        return batch

    options: dict[str, Any] = {"sampler": lambda _: np.arange(12 * 2000) % NUM_SAMPLES, "min_samples": 1}
    with cs.EpochLoader(cache, 2000, prefetch=prefetch, batch_transform=count, **options) as loader:
        for _ in loader:
            taken += 1
            with changed:
                assert changed.wait_for(lambda: made >= min(12, taken + prefetch), 60)  # noqa: B023
                assert made <= taken + prefetch + 2 or taken > 5, (
                    "two threads transform, of the next epoch too"
                )


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_batches_are_delivered_on_the_device(device: Any, cache: cs.Cache) -> None:
    with cs.EpochLoader(cache, 10, device=device) as loader:
        assert {batch["x"].device.type for batch in loader} == {"cpu"}


# --- what is refused

REFUSED: Final[list[tuple[dict[str, Any], str]]] = [
    ({"batch_size": 0}, "batch_size=0"),
    ({"batch_size": True}, "batch_size=True"),
    ({"seed": 1.5}, "seed=1.5"),
    ({"epoch_size": -5}, "epoch_size=-5"),
    ({"min_samples": 0}, "min_samples=0"),
    ({"turnover": 1.5}, "turnover=1.5"),
    ({"prefetch": 0}, "prefetch=0"),
    ({"timeout_s": 0}, "timeout_s=0"),
    ({"device": "tpu"}, "device='tpu'"),
    ({"sampler": 5}, "sampler=5"),
    ({"batch_transform": 5}, "batch_transform=5: give a function"),
    ({"record": 5}, "record=5: give a path"),
    ({"replay": 5}, "replay=5: give a path"),
    ({"weights": [1]}, "weights=list: give True, or a mapping"),
    ({"weights": {1: 2.0}}, "are str, not 1"),
    ({"weights": {"a": "b"}}, "give numbers"),
    ({"locality": 0}, "locality=0"),
    ({"ragged": "dense"}, "ragged='dense': give 'list', 'padded' or 'nested'"),
    ({"split": "test", "holdout": 0.1}, "split='test': give 'train' or 'held-out'"),
    ({"split": "held-out"}, "say which share, such as holdout=0.05"),
    ({"holdout": 1}, "holdout=1: give a share"),
    ({"mixture": []}, "for each source"),
    ({"mixture": lambda: [1]}, "give fn(step), or fn(epoch)"),
    ({"where": "number > 3"}, "give a function of a shard's columns that returns a mask"),
    ({"columns": "number"}, "give a list of fields"),
    ({"columns": ["x", "x"]}, "each once"),
    ({"columns": ["__key__"]}, "with_keys=True"),
    ({"max_tokens": 8192}, "give the field with the tokens"),
    ({"max_tokens": {"x": 0}}, "max_tokens"),
    ({"max_cache_size": 5}, "max_cache_size"),
    ({"prefetch_factor": 2}, "it is called 'prefetch'"),
    ({"num_replicas": 2}, "torch.distributed"),
    ({"num_workers": 2}, "start_worker"),
    ({"transform": len}, "batch_transform="),
    ({"collate_fn": len}, "batch_transform="),
    ({"generator": None}, "give seed="),
    ({"shufle": True}, "do you mean 'shuffle'?"),
    *(({"locality": 8} | other, "do not go together") for other in ({"weights": True}, {"sampler": [1]})),
    *(
        ({"max_tokens": {"x": 9}} | other, "do not go together")
        for other in ({"locality": 8}, {"mixture": [1]})
    ),
    *(({"replay": "."} | other, "do not go together") for other in ({"epoch_size": 8}, {"weights": True})),
    *(({"shuffle": False} | other, "is a way to shuffle") for other in ({"locality": 8}, {"mixture": [1]})),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=lambda value: shown(value)[:40])
def test_an_argument_that_cannot_work_is_refused_with_advice(
    options: dict[str, Any], words: str, kinds: cs.Cache
) -> None:
    with pytest.raises(cs.ConfigError) as caught:
        cs.EpochLoader(kinds, **{"batch_size": 4, **options})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epoch_size": 3}, "epoch_size=3"),
        ({"sampler": lambda _: [0, NUM_VARIOUS]}, f"sample {NUM_VARIOUS} of a dataset of {NUM_VARIOUS}"),
        ({"sampler": lambda _: 5}, "let it return a torch sampler"),
        ({"columns": ["y"]}, "columns= names 'y', and the samples have"),
        ({"where": lambda columns: columns["y"] > 1}, "no field 'y'"),
        ({"where": lambda _: True}, "return a mask, bool ["),
        ({"max_tokens": {"number": 9}}, "'number' is one number in each sample"),
        ({"max_tokens": {"y": 9}}, "no field 'y'"),
        ({"ragged": {"number": "padded"}}, "'number', a number"),
        ({"mixture": {"a": 1, "b": 1}}, "cs.mix"),
    ],
    ids=lambda value: shown(value)[:30],
)
def test_what_does_not_fit_the_samples_is_refused_when_an_epoch_is_prepared(
    options: dict[str, Any], words: str, kinds: cs.Cache
) -> None:
    with cs.EpochLoader(kinds, 4, **options) as loader, pytest.raises(cs.ConfigError) as caught:
        next(iter(loader))
    assert words in str(caught.value)


class OwnError(Exception):
    """An error that only the test knows."""


@pytest.mark.parametrize("option", ["batch_transform", "sampler"])
def test_errors_of_the_users_code_come_to_the_trainer_as_they_are(option: str, cache: cs.Cache) -> None:
    def fail(_: Any) -> Any:
        raise OwnError("mine")

    def iterate() -> Iterator[Any]:
        given: dict[str, Any] = {option: fail}
        with cs.EpochLoader(cache, 10, **given) as loader:
            yield from loader

    with pytest.raises(OwnError, match="mine"):
        next(iterate())


def test_a_path_is_no_cache() -> None:
    give: Callable[..., Any] = cs.EpochLoader
    with pytest.raises(cs.ConfigError, match=r"give a cachestream\.Cache"):
        give("/scratch", 4)
