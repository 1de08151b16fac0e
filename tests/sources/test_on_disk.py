"""Sources that only read files on disks of this machine, which a process may wait for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cachestream as cs
from cachestream.sources.base import reads_from_disk
from cachestream.transport import local_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "0.npy", np.zeros((4, 4), np.float32))
    return tmp_path


def test_files_and_arrays_of_a_disk_are_on_it_and_what_users_write_may_wait_for_anything(
    folder: Path,
) -> None:
    assert reads_from_disk(cs.open_source(str(folder)))
    assert reads_from_disk(cs.ArraySource(str(folder / "0.npy"), window=1))
    assert not reads_from_disk(cs.open_source(lambda rng: {"x": rng.random()}))


@pytest.mark.parametrize("kind", ["nfs4", "fuse.gcsfuse", "fuseblk", "lustre"])
def test_a_mount_of_a_network_or_of_a_program_is_no_disk(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "filesystem_of", lambda _path: kind)
    assert not reads_from_disk(cs.open_source(str(folder)))
    assert not reads_from_disk(cs.ArraySource(str(folder / "0.npy"), window=1))
