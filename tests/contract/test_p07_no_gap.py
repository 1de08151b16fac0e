"""P7: no gap between epochs. The snapshot, the shards and the first batches of the next epoch are ready before the last
batch of this one is given back: then the catalogue may be locked and the shards may be gone.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from torch.utils.data import RandomSampler

import cachestream as cs
from tests.contract.conftest import NUM_SAMPLES, shown
from tests.contract.loader_acts import write_remote

PATIENCE_S: Final = 120.0
BATCH: Final = 10


class Made:
    """A batch transform that knows how many batches it was given."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def __call__(self, batch: Any) -> Any:
        with self._changed:
            self._count += 1
            self._changed.notify_all()
        return batch

    def wait(self, count: int) -> None:
        """Wait until so many batches have been made."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._count >= count, PATIENCE_S), (self._count, count)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep everybody from the catalogue of the cache at `path`."""
    catalogue = sqlite3.connect(path / "catalogue.sqlite", isolation_level=None, timeout=60)
    try:
        catalogue.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        catalogue.close()


@contextmanager
def out_of_reach(path: Path) -> Iterator[None]:
    """Lock the catalogue of the cache at `path`, and hide its shards."""
    hidden = path.parent / "hidden"
    with locked(path):
        (path / "shards").rename(hidden)
        try:
            yield
        finally:
            hidden.rename(path / "shards")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False},
        {"sampler": RandomSampler},
        {"weights": True},
        {"locality": 60},
        {"epoch_size": NUM_SAMPLES // 2},
        {"epoch_size": 2 * NUM_SAMPLES},
        {"device": "cpu", "prefetch": 1},
    ],
    ids=shown,
)
def test_the_next_epoch_begins_though_nothing_can_be_read_since_the_last_batch_of_this_one(
    options: dict[str, Any], new_path: Callable[[], Path]
) -> None:
    made = Made()
    path = new_path()
    with cs.Cache(path) as cache, cs.EpochLoader(cache, BATCH, batch_transform=made, **options) as loader:
        batches = iter(loader)
        steps = len(loader)
        held = [next(batches) for _ in range(steps)]
        made.wait(steps + 1)
        with out_of_reach(path):
            assert next(batches, None) is None
            assert len(loader) == steps
            following = iter(loader)
            assert next(following)["number"].shape == held[-1]["number"].shape
            assert loader.epoch == 1
        assert 1 + len(list(following)) == steps


def test_epochs_of_other_shards_each_are_opened_ahead_too(new_path: Callable[[], Path]) -> None:
    """Half of the cache an epoch: the second one reads shards that the first one did not."""
    made, path = Made(), new_path()
    with (
        cs.Cache(path) as cache,
        cs.EpochLoader(cache, BATCH, epoch_size=NUM_SAMPLES // 2, batch_transform=made) as loader,
    ):
        first = [n for batch in take(loader, len(loader)) for n in batch["number"].tolist()]
        made.wait(NUM_SAMPLES // 2 // BATCH + 1)
        with out_of_reach(path):
            second = [n for batch in take(loader, 3) for n in batch["number"].tolist()]
    assert len(set(first)) == NUM_SAMPLES // 2
    assert len(set(second)) == 3 * BATCH
    assert len(set(second) - set(first)) > BATCH  # but for the shard in which the first half ended


def take(loader: cs.EpochLoader, count: int) -> list[Any]:
    """The first batches of an epoch, which is not asked for another one."""
    batches = iter(loader)
    return [next(batches) for _ in range(count)]


def test_the_next_snapshot_is_that_of_before_the_last_batch_and_the_one_after_has_what_came_since(
    tmp_path: Path,
) -> None:
    remote, made = tmp_path / "remote", Made()
    write_remote(remote / "a", range(40))
    source = cs.open_source(remote)
    with cs.Cache(tmp_path / "c", "4MB", min_free=0) as cache:
        with cs.start_worker(cache, source, num_workers=1) as worker:
            worker.wait(timeout_s=PATIENCE_S)
        with cs.EpochLoader(cache, 10, batch_transform=made) as loader:
            take(loader, 4)
            made.wait(5)
            write_remote(remote / "b", range(40, 60))
            with cs.start_worker(cache, cs.open_source(remote), num_workers=1) as worker:
                worker.wait(timeout_s=PATIENCE_S)
            assert cache.num_samples == 60
            sizes = [sorted(n for batch in loader for n in batch["number"].tolist()) for _ in range(2)]
    assert sizes == [list(range(40)), list(range(60))]
