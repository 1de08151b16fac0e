"""One machine over the loader: every way to draw, under every event of a training that stops, goes on and changes its size.

The model: an epoch is a list of numbers, fixed when it begins. Whoever goes on from a state, with whatever ranks and
batches, gets the next ones of the list, less those that are no longer cached; in the end, less the tail that is dropped.
An epoch of a fixed length (`epoch_size`) has others in place of those that are no longer cached.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import cachestream as cs
from tests.contract.loader_acts import OPTIONS, Act, Played, Ranks, play, samples_of, write_remote

MIXED: Final = "mixture"
ONE_SHAPE: Final = ("tokens",)  # batches of which depend on `batch_size`, so that it stays
SIZES: Final = st.integers(1, 5)
MANY: Final = 3
ENOUGH: Final = 45  # samples of which a shard may be lost: what is left makes a batch for every rank
JOBS: Final = st.sampled_from([1, MANY])


@contextmanager
def filled(cache: cs.Cache, source: object) -> Iterator[None]:
    """`cache`, when all of `source` is in it."""
    with cs.start_worker(cache, source, num_workers=1, shard_size="1KB") as worker:
        worker.wait(timeout_s=120)
        yield


def make_base(folder: Path) -> None:
    """Two caches to copy: "files", from one folder, and "mixed", from a mix of two."""
    write_remote(folder / "remote" / "a", range(60))
    write_remote(folder / "more" / "b", range(100, 120))
    mixed = cs.mix({"a": (cs.open_source(folder / "remote"), 3), "b": (cs.open_source(folder / "more"), 1)})
    for name, source in {"files": cs.open_source(folder / "remote"), "mixed": mixed}.items():
        with cs.Cache(folder / name, "50MB", min_free=0) as cache, filled(cache, source):
            pass


class Training(RuleBasedStateMachine):
    """A training as its acts, one after the other, and the list that the running epoch should be."""

    base: Path
    ranks: Ranks

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.cache = self.folder / "cache"
        self.state: dict[str, Any] | None = None
        self.epoch = 0
        self.rest: list[int] | None = None  # of the running epoch; None between epochs
        self.seen: list[int] = []
        self.whole = True  # nothing of the running epoch was evicted or lost
        self.due = 0  # samples that an epoch of a fixed length still has, after some were lost
        self.grown = 0

    @initialize(options=st.sampled_from(sorted(OPTIONS)), drop_last=st.booleans())
    def start(self, options: str, drop_last: bool) -> None:
        self.options, self.drop_last = options, drop_last
        shutil.copytree(self.base / ("mixed" if options == MIXED else "files"), self.cache)
        self.remote = self.base / "remote"

    def teardown(self) -> None:
        for path in self.base.glob("remote/grown/*"):
            path.unlink()
        shutil.rmtree(self.folder)

    # --- events

    @precondition(lambda self: self.rest is None)
    @rule(batch_size=SIZES, size=JOBS)
    def begin(self, batch_size: int, size: int) -> None:
        cached = self.eligible()
        size, batch_size = self.shape(size, batch_size)
        if len(self.drawn_from(cached)) < 2 * size * batch_size:
            return
        (first, *_) = played = self.act(size, batch_size, 1)
        assert first.epoch == self.epoch
        self.state = first.state
        head = in_order(played)
        (reference,) = self.act(1, batch_size if self.options in ONE_SHAPE else 1, None)
        # The later passes of an epoch of several are drawn when they begin, for the batches of then.
        self.rest, self.seen, self.whole = in_order([reference]), head, self.options != "more"
        self.check_epoch(cached, head + self.rest)

    @precondition(lambda self: self.rest is not None)
    @rule(batch_size=SIZES, size=JOBS, steps=st.integers(1, 4))
    def go_on(self, batch_size: int, size: int, steps: int) -> None:
        assert self.rest is not None
        size, batch_size = self.shape(size, batch_size)
        if len(self.rest) < size * batch_size * (steps + 1):
            return
        (first, *_) = played = self.act(size, batch_size, steps)
        delivered = in_order(played)
        if self.due:
            assert delivered == self.rest[: len(delivered)]
        self.take(delivered, first.state)

    @precondition(lambda self: self.rest is not None)
    @rule(batch_size=SIZES, size=JOBS)
    def finish(self, batch_size: int, size: int) -> None:
        assert self.rest is not None
        size, batch_size = self.shape(size, batch_size)
        tail = max(self.due, len(self.rest)) % (size * batch_size)
        dropped = tail if (self.drop_last and self.options not in ONE_SHAPE) or tail < size else 0
        if not self.rest or dropped == len(self.rest):
            return
        (first, *others) = played = self.act(size, batch_size, None)
        assert all(len(one.batches) == one.left for one in played)
        assert all(one.state == first.state for one in others)
        delivered = in_order(played)
        if self.whole:
            assert len(delivered) == len(self.rest) - dropped
        if self.due:
            assert len(delivered) == self.due - dropped
            kept = (
                len(self.rest) // (size * batch_size) * size * batch_size
            )  # what comes first, in whole batches
            assert delivered[:kept] == self.rest[:kept]
        self.take(delivered, first.state)
        assert first.epoch == self.epoch + 1
        self.rest, self.epoch = None, self.epoch + 1

    @precondition(lambda self: self.rest)
    @rule(batch_size=SIZES)
    def leave(self, batch_size: int) -> None:
        """A `break`: the next iteration is the next epoch."""
        _, batch_size = self.shape(1, batch_size)
        enough = 2 * batch_size <= min(len(self.rest or ()), len(self.drawn_from(self.eligible())))
        if not enough:
            return
        (played,) = self.act(1, batch_size, 1, leave=True)
        assert played.epoch == self.epoch + 1
        self.epoch, self.state = self.epoch + 1, played.state
        (reference,) = self.act(1, batch_size if self.options in ONE_SHAPE else 1, None)
        self.rest, self.seen, self.whole, self.due = in_order([reference]), [], False, 0

    @precondition(lambda self: self.rest)
    @rule(after_ms=st.integers(1, 40))
    def interrupt(self, after_ms: int) -> None:
        """A Ctrl-C at any moment: the state counts the batches that were given, but for the one under way."""
        assert self.rest is not None
        taken: list[list[int]] = []
        with cs.Cache(self.cache) as cache, self.loader(cache) as loader:
            loader.load_state_dict(self.state or {})
            before = signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                signal.setitimer(signal.ITIMER_REAL, after_ms / 1000)
                for batch in loader:
                    taken.append(batch["number"].tolist())  # noqa: PERF401 - what is taken before the interrupt counts
            except KeyboardInterrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
            state = loader.state_dict()
            in_epoch = loader.epoch == self.epoch
        if not in_epoch:
            return
        drawn = [number for batch in taken for number in batch]
        assert drawn == self.rest[: len(drawn)] or not self.whole
        self.state = state
        (reference,) = self.act(1, 4 if self.options in ONE_SHAPE else 1, None)
        left = in_order([reference])
        if self.whole:
            lost = len(self.rest) - len(drawn) - len(left)
            assert 0 <= lost <= 4
            assert left == self.rest[len(drawn) + lost :]
        self.rest, self.due = left, 0

    @precondition(lambda self: self.options != MIXED and self.grown < 2)
    @rule()
    def grow(self) -> None:
        first = 200 + 10 * self.grown
        write_remote(self.base / "remote" / "grown", range(first, first + 10))
        with cs.Cache(self.cache) as cache, filled(cache, cs.open_source(self.remote)):
            pass
        self.grown += 1
        assert set(samples_of(self.cache)) >= set(range(first, first + 10))

    @precondition(lambda self: len(self.eligible()) > ENOUGH)
    @rule()
    def evict(self) -> None:
        with cs.Cache(self.cache) as cache:
            cache.evict(to=cache.size_bytes - 2000)
        self.lose()

    @precondition(lambda self: len(self.eligible()) > ENOUGH)
    @rule(place=st.integers(0, 100))
    def lose_a_file(self, place: int) -> None:
        """Another program removes a shard."""
        shards = sorted((self.cache / "shards").rglob("*.safetensors"))
        shards[place % len(shards)].unlink()
        with cs.Cache(self.cache) as cache:
            cache.verify(repair=True)
        self.lose()

    # --- the model

    def check_epoch(self, cached: list[int], drawn: list[int]) -> None:
        """`drawn` is an epoch over `cached`, both whole and in order."""
        expected = self.drawn_from(cached)
        if self.options in {"in order", "sampler"}:
            assert drawn == expected
        counts = Counter(drawn)
        assert set(counts) <= set(cached)
        assert len(drawn) == len(expected)
        if self.options == MIXED:
            of_a = [sum(number < 100 for number in drawn[:end]) for end in range(len(drawn) + 1)]
            assert all(abs(a - end / 2) < 1 for end, a in enumerate(of_a) if end >= 25)
        elif self.options == "more":
            least, rest = divmod(150, len(cached))
            assert set(counts.values()) <= {least, least + (rest > 0)}
        else:
            assert max(counts.values()) == 1

    def drawn_from(self, cached: list[int]) -> list[int]:
        """As many samples as an epoch over `cached` has, and where the order is fixed, in that order."""
        match self.options:
            case "sampler":
                return cached[::-2]
            case "fewer":
                return cached[:20]
            case "more":
                return (cached * 150)[:150]
        return cached

    def eligible(self) -> list[int]:
        names = ("where", "split", "holdout")
        given = {name: value for name, value in OPTIONS[self.options].items() if name in names}
        return samples_of(self.cache, **given)

    def shape(self, size: int, batch_size: int) -> tuple[int, int]:
        return (1, 4) if self.options in ONE_SHAPE else (size, batch_size)

    def act(
        self, size: int, batch_size: int, steps: int | None, *, leave: bool = False, **more: Any
    ) -> list[Played]:
        drop_last = self.drop_last if size * batch_size > 1 else False
        act = Act(
            self.cache, self.options, batch_size, steps, size, self.state, drop_last, leave=leave, more=more
        )
        return play(act) if size == 1 else self.ranks.play(act)

    def loader(self, cache: cs.Cache) -> cs.EpochLoader:
        return cs.EpochLoader(cache, 4, drop_last=False, **OPTIONS[self.options])

    def take(self, delivered: list[int], state: dict[str, Any]) -> None:
        assert self.rest is not None
        if self.whole:
            assert delivered == self.rest[: len(delivered)]
            assert self.options in {MIXED, "more"} or not set(delivered) & set(self.seen)
        self.due = 0
        self.rest, self.seen, self.state = self.rest[len(delivered) :], self.seen + delivered, state

    def lose(self) -> None:
        """The running epoch goes on with what is still cached."""
        if self.rest is None:
            return
        if self.options in {"more", MIXED, *ONE_SHAPE}:
            self.whole = False
            return
        cached, before = set(samples_of(self.cache)), self.rest
        self.rest = [number for number in before if number in cached]
        if self.options == "fewer" and self.rest != before and (self.whole or self.due):
            # An epoch of a fixed length draws others in their place.
            self.due, self.whole = self.due or len(before), False
        if not self.rest:  # the rest of the epoch is drawn anew
            self.due = 0
            self.rest = None
            self.state = None
            self.epoch = 0


def in_order(played: list[Played]) -> list[int]:
    """The numbers in the order of the epoch: step by step, and rank by rank."""
    steps = zip(*(one.batches for one in played), strict=True)
    return [number for step in steps for batch in step for number in batch]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[Training]]:
    base = tmp_path_factory.mktemp("loader")
    make_base(base)
    ranks = Ranks(MANY)
    yield type("TrainingHere", (Training,), {"base": base, "ranks": ranks})
    ranks.close()


@pytest.mark.hypothesis
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:.* are not cached any more since its state was saved")
def test_any_training_gets_the_samples_of_its_epochs_in_order_and_once(machine: type[Training]) -> None:
    examples = (
        int(os.environ.get("TRAININGS", "0")) or settings().max_examples // 4
    )  # an example is a training
    few = settings(
        max_examples=examples, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(machine, settings=few)
