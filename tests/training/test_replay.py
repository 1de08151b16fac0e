"""Manifests: a replay gives the same batches, from any cache that holds the shards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachestream import EpochError, EpochLoader
from cachestream.training import manifests
from cachestream.training.manifests import EpochManifest, save_manifest
from tests.training.conftest import NewCache, NewJob
from tests.worker.support import DEADLINE_S, wait_until


def epochs(loader: EpochLoader, count: int) -> list[list[list[int]]]:
    """[epoch][batch] is a list of numbers."""
    return [[batch["number"].tolist() for batch in loader] for _ in range(count)]


def test_the_rest_of_an_epoch_whose_manifest_is_gone_is_refused_and_holds_no_shards(
    new_cache: NewCache, tmp_path: Path
) -> None:
    cache, folder = new_cache(3, 9), tmp_path / "manifests"
    with EpochLoader(cache, 4, record=folder) as loader:
        epochs(loader, 2)
    with EpochLoader(cache, 4, replay=folder) as loader:
        next(iter(loader))
        state = loader.state_dict()
    (folder / "epoch-000000.json").unlink()
    with EpochLoader(cache, 4, replay=folder) as loader:
        loader.load_state_dict(state)
        with pytest.raises(EpochError, match="epoch 0 is not recorded") as refused:
            next(iter(loader))
        assert cache.status().leases == 0, refused  # which refers to all that failed


def test_manifests_may_lie_at_the_users_home(
    new_cache: NewCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    cache = new_cache(3, 9)
    with EpochLoader(cache, 4, record="~/run") as loader:
        trained = epochs(loader, 1)
    assert (tmp_path / "home" / "run" / "epoch-000000.json").exists()
    with EpochLoader(cache, 4, replay="~/run") as loader:
        assert epochs(loader, 1) == trained


@pytest.mark.e2e
def test_ranks_with_caches_of_their_own_leave_a_manifest_for_each_and_replay_both(
    new_cache: NewCache, new_job: NewJob, tmp_path: Path
) -> None:
    caches, folder = [new_cache(2, 10), new_cache(3, 10, 1000)], tmp_path / "run"
    trained = new_job(2).run(lambda rank, make: epochs(make(caches[rank], 4, record=folder), 2))
    disks = [tmp_path / "disk0", tmp_path / "disk1"]  # each node records on its own
    for disk, pattern in zip(disks, ("epoch-??????.json", "*.rank1.json"), strict=True):
        disk.mkdir()
        for path in folder.glob(pattern):
            shutil.copy(path, disk)
    assert new_job(2).run(lambda rank, make: epochs(make(caches[rank], 4, replay=disks[rank]), 2)) == trained
    assert sorted(path.name for path in folder.iterdir())[:2] == [
        "epoch-000000.json",
        "epoch-000000.rank1.json",
    ]
    assert new_job(2).run(lambda rank, make: epochs(make(caches[rank], 4, replay=folder), 2)) == trained
    caches[1].quarantine(1, "a test")
    errors = new_job(2).run(lambda rank, make: epochs(make(caches[rank], 4, replay=folder), 2))
    assert all(isinstance(error, EpochError) and "1 of the 3 shards" in str(error) for error in errors)


def test_a_folder_that_is_gone_costs_the_records_with_a_warning_and_not_the_training(
    new_cache: NewCache, tmp_path: Path
) -> None:
    with EpochLoader(new_cache(2, 8), 4, record=tmp_path / "run") as loader:
        shutil.rmtree(tmp_path / "run")
        assert len(epochs(loader, 1)[0]) == 4
        with pytest.warns(UserWarning, match="an epoch could not be recorded"):
            loader.close()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk for manifests that answers once the event is set; waits for it are cut short."""
    answers = threading.Event()

    def save(path: str, manifest: EpochManifest) -> None:
        assert answers.wait(DEADLINE_S)
        save_manifest(path, manifest)

    monkeypatch.setattr(manifests, "save_manifest", save)
    monkeypatch.setattr(manifests, "_CLOSE_S", 0.1)
    yield answers
    answers.set()
    wait_until(lambda: not recording(), "all is recorded")


def recording() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cachestream-record")]


@pytest.mark.e2e
def test_a_disk_that_does_not_answer_costs_a_warning_and_neither_the_state_nor_the_end(
    disk: threading.Event, new_cache: NewCache, tmp_path: Path
) -> None:
    cache, late = new_cache(2, 8), r"1 of the manifests in .*run are not written after 0\.1 s.* faster disk"
    loader = EpochLoader(cache, 4, record=tmp_path / "run")
    next(iter(loader))
    with pytest.warns(UserWarning, match=late):
        assert loader.state_dict()["epoch"] == 0
    with pytest.warns(UserWarning, match=late):
        loader.close()
    with pytest.raises(EpochError, match="closed"):
        iter(loader)
    disk.set()
    wait_until(lambda: not recording(), "it is written when the disk answers")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["epoch-000000.json"]
    assert cache.status().leases == 0


def test_a_loader_whose_last_warning_is_made_an_error_is_closed_all_the_same(
    disk: threading.Event, new_cache: NewCache, tmp_path: Path
) -> None:
    loader = EpochLoader(new_cache(2, 8), 4, record=tmp_path / "run")
    next(iter(loader))
    with pytest.raises(UserWarning, match="not written"):
        loader.close()
    assert not loader._background._thread.is_alive()
    assert not disk.is_set()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12 warns where threads run
def test_a_forked_child_waits_for_nothing_that_its_parent_records(
    disk: threading.Event, new_cache: NewCache, tmp_path: Path
) -> None:
    with EpochLoader(new_cache(2, 8), 4, record=tmp_path / "run") as loader:
        next(iter(loader))
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # ends a child that waits
            try:
                loader.state_dict()
                loader.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        disk.set()
        assert len(epochs(loader, 1)[0]) == 4


def test_a_manifest_is_json_that_names_shards_by_content(new_cache: NewCache, tmp_path: Path) -> None:
    cache = new_cache(2, 8)
    with EpochLoader(cache, 4, record=tmp_path, seed=7) as loader:
        next(iter(loader))
    values = json.loads((tmp_path / "epoch-000000.json").read_text())
    assert values["settings"]["seed"] == 7
    (stretch,) = values["stretches"]
    assert (stretch["batches"], stretch["batch_size"], stretch["samples"]) == (4, 4, 16)
    assert len({shard[2] for shard in values["shards"]}) == 2
    assert np.sum([shard[1] for shard in values["shards"]]) == 16
