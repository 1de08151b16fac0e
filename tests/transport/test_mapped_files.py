"""Mapped parts of local files: the same bytes, few descriptors, errors instead of signals."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from cachestream.errors import SampleError
from cachestream.linux import FileMap
from cachestream.transport import metering
from cachestream.transport.backends import Version
from cachestream.transport.local_files import mapped_spans
from cachestream.transport.remote import Remote
from cachestream.transport.remote_errors import ChangedError
from cachestream.transport.remote_object import RemoteObject

SPANS = [(10, 20), (5_000, 900_000), (8_192, 8_192), (999_990, 1_000_000)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of 1 MB."""
    path = tmp_path / "data.bin"
    path.write_bytes(np.random.default_rng(0).bytes(1_000_000))
    return path


def ranged(path: Path) -> RemoteObject:
    return RemoteObject(Remote(str(path)), str(path), str(path))


@pytest.mark.parametrize("can_bring_in", [True, False])
def test_sparse_spans_hold_what_the_file_holds_mapped_or_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, can_bring_in: bool
) -> None:
    if not can_bring_in:
        monkeypatch.setattr(FileMap, "bring_in", lambda *_: False)
    content = path.read_bytes()
    found = ranged(path).read_spans(SPANS, sparse=True)
    assert [bytes(one) for one in found] == [content[start:stop] for start, stop in SPANS]
    assert found[1].readonly is can_bring_in


def test_pages_that_are_not_in_memory_are_brought_in(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapped = FileMap(file.fileno(), 1_000_000)
    found = mapped_spans(mapped, SPANS)
    assert found is not None
    assert bytes(found[1]) == path.read_bytes()[5_000:900_000]
    assert mapped.is_cached(5_000, 900_000)


def test_a_file_that_became_shorter_is_an_error_and_no_signal(path: Path) -> None:
    file = ranged(path)
    file.read_spans(SPANS, sparse=True)
    with open(path, "rb") as opened:
        mapped = FileMap(opened.fileno(), 1_000_000)
    os.truncate(path, 4096)
    with pytest.raises(ChangedError):
        file.read_spans(SPANS[:1], sparse=True)
    with pytest.raises(OSError, match="Input/output error"):  # also if the size is not checked again
        mapped_spans(mapped, SPANS)
    file.version = Version()
    with pytest.raises(SampleError, match="ends after"):
        file.read_spans(SPANS, sparse=True)


def test_a_file_that_was_replaced_is_noticed_and_its_new_content_read(path: Path) -> None:
    file = ranged(path)
    file.read_spans(SPANS, sparse=True)
    other = path.with_suffix(".new")
    other.write_bytes(bytes(1_000_000))
    other.rename(path)
    with pytest.raises(ChangedError):
        file.read_spans(SPANS, sparse=True)
    file.version = Version()
    assert bytes(file.read_spans(SPANS[:1], sparse=True)[0]) == bytes(10)


def test_maps_cost_no_descriptors_and_views_outlive_their_file(tmp_path: Path) -> None:
    before, views = len(os.listdir("/proc/self/fd")), []
    for number in range(40):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(number.to_bytes(4, "little") * 100)
        views.append(ranged(path).read_spans([(4, 8)], sparse=True)[0])
    assert len(os.listdir("/proc/self/fd")) == before
    assert [int.from_bytes(view, "little") for view in views] == list(range(40))


def test_a_file_that_was_mapped_still_pickles(path: Path) -> None:
    file = ranged(path)
    file.read_spans(SPANS, sparse=True)
    copy = pickle.loads(pickle.dumps(file))
    assert bytes(copy.read_spans(SPANS, sparse=True)[0]) == path.read_bytes()[10:20]


@pytest.mark.parametrize("can_bring_in", [True, False])
def test_bytes_are_announced_once_mapped_or_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, can_bring_in: bool
) -> None:
    """Under a bandwidth limit, a reader waits for what it announces."""
    monkeypatch.setattr(FileMap, "bring_in", lambda *_: can_bring_in)
    asked: list[int] = []
    came: list[int] = []
    metering.install(came.append, asked.append)
    try:
        ranged(path).read_spans(SPANS, sparse=True)
    finally:
        metering.install(None)
    assert sum(asked) == sum(came) == sum(stop - start for start, stop in SPANS)
