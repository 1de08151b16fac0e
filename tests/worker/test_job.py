"""Jobs: the user's objects arrive unchanged, and all processes share one listing in memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachestream import Cache
from cachestream.formats.files import FileSource
from cachestream.listing.manifest import Manifest
from cachestream.listing.names import Names
from cachestream.sources.datasets import CallableSource
from cachestream.worker.job import Job, Packed, Payload, load_shared, pack, share, unpack
from cachestream.worker.launch import WorkerOptions

WEIGHTS = np.arange(50_000.0)


def job_of(payload: Packed) -> Job:
    return Job(
        root="/nowhere",
        sys_path=(),
        fingerprint="x",
        kind="shuffle",
        seed=0,
        num_units=1,
        listing="",
        num_workers=1,
        concurrency=1,
        shard_bytes=1,
        bandwidth_bytes_per_s=None,
        when_full="evict",
        hang_timeout_s=1.0,
        custom_eviction=False,
        payload=payload,
        sampler=None,
    )


def through_memory(payload: Packed) -> Job:
    """As it goes: through the pipe to the supervisor, and the memory that the sampling processes inherit."""
    return load_shared(share(pickle.loads(pickle.dumps(job_of(payload)))))


@pytest.mark.e2e
def test_names_arrive_unchanged_and_are_not_copied() -> None:
    names = Names(f"folder/{number:09d}.jpg" for number in range(20_000))
    before = len(os.listdir("/proc/self/fd"))
    job = through_memory(pack(Payload(names, None, None, None)))
    found = unpack(job.payload).source
    block, offsets = found._held
    assert isinstance(block, memoryview)
    assert not offsets.flags.owndata
    assert len(job.payload.data) < 2000
    assert list(found) == list(names)
    assert found.digest == names.digest
    again = pickle.loads(pickle.dumps(found))
    assert list(again) == list(names)
    assert isinstance(again._held[0], bytes)
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the map's own


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_names_pickle_with_every_protocol(protocol: int) -> None:
    names = Names(["a", "é/b", ""])
    assert list(pickle.loads(pickle.dumps(names, protocol))) == ["a", "é/b", ""]


def test_the_users_own_arrays_can_be_written_to_in_each_process() -> None:
    def transform(sample: Any) -> Any:
        WEIGHTS[0] += 1
        return sample

    job = through_memory(pack(Payload(CallableSource(lambda _: WEIGHTS, 3), transform, None, WEIGHTS)))
    assert not job.payload.buffers
    payload = unpack(job.payload)
    assert payload.weights.flags.writeable
    assert np.array_equal(payload.weights, WEIGHTS)


def test_several_buffers_of_odd_sizes_come_back_in_their_places() -> None:
    sources = [Names([letter * (70_000 + i)]) for i, letter in enumerate("abc")]
    found = unpack(through_memory(pack(Payload(sources, None, None, None))).payload).source
    assert [list(names) for names in found] == [list(names) for names in sources]


def test_a_job_without_buffers_is_as_before() -> None:
    job = job_of(pack(Payload([1], None, None, None)))
    assert through_memory(job.payload) == replace(job)
    assert unpack(job.payload).source == [1]


@pytest.mark.e2e
def test_a_sampling_process_maps_the_names_of_a_manifest(tmp_path: Path) -> None:
    """In a process of its own: its memory that is not shared grows by less than the names take."""
    listed = tmp_path / "list.txt"
    with listed.open("w", encoding="utf-8") as file:
        file.writelines(
            f"train/class-{number % 1000:04d}/image-{number:09d}.jpeg\n" for number in range(200_000)
        )
    source = FileSource(Manifest(listed), label=None)
    with Cache(tmp_path / "cache", size_limit="20MB", min_free=0) as cache:
        options = WorkerOptions(1, None, "shuffle", None, "evict", 1, 30.0)
        fd = share(options.job(cache, source))
    code = (
        "import re, sys; from cachestream.worker.job import load_shared, unpack\n"
        "import cachestream.formats.files\n"
        "anon = lambda: int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = anon(); source = unpack(load_shared(int(sys.argv[1])).payload).source\n"
        "assert source.key(199_999) == 'class-0999/image-000199999.jpeg', source.key(199_999)\n"
        "print(source._files.names.nbytes // 1024, anon() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(fd)],
        pass_fds=(fd,),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    os.close(fd)
    assert done.returncode == 0, done.stderr
    names_kib, grown_kib = map(int, done.stdout.split())
    assert names_kib > 5000
    assert grown_kib < names_kib / 3
