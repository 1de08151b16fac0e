"""Jobs: the user's objects arrive unchanged, and what is large is not copied."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cachestream.listing.names import Names
from cachestream.sources.datasets import CallableSource
from cachestream.worker.job import Job, Packed, Payload, pack, unpack

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


def through_the_pipe(payload: Packed) -> Job:
    """The job as the supervisor gets it, whose processes inherit it."""
    job: Job = pickle.loads(pickle.dumps(job_of(payload)))
    return job


@pytest.mark.e2e
def test_names_arrive_unchanged_and_are_not_copied() -> None:
    names = Names(f"folder/{number:09d}.jpg" for number in range(20_000))
    before = len(os.listdir("/proc/self/fd"))
    job = through_the_pipe(pack(Payload(names, None, None)))
    found = unpack(job.payload).source
    _, offsets = found._held
    assert not offsets.flags.owndata
    assert len(job.payload.data) < 2000
    assert list(found) == list(names)
    assert found.digest == names.digest
    again = pickle.loads(pickle.dumps(found))
    assert list(again) == list(names)
    assert isinstance(again._held[0], bytes)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_names_pickle_with_every_protocol(protocol: int) -> None:
    names = Names(["a", "é/b", ""])
    assert list(pickle.loads(pickle.dumps(names, protocol))) == ["a", "é/b", ""]


def test_the_users_own_arrays_can_be_written_to_in_each_process() -> None:
    def transform(sample: Any) -> Any:
        WEIGHTS[0] += 1
        return sample

    job = through_the_pipe(pack(Payload(CallableSource(lambda _: WEIGHTS, 3), transform, WEIGHTS)))
    assert not job.payload.buffers
    payload = unpack(job.payload)
    assert payload.eviction.flags.writeable
    assert np.array_equal(payload.eviction, WEIGHTS)


def test_several_buffers_of_odd_sizes_come_back_in_their_places() -> None:
    sources = [Names([letter * (70_000 + i)]) for i, letter in enumerate("abc")]
    found = unpack(through_the_pipe(pack(Payload(sources, None, None))).payload).source
    assert [list(names) for names in found] == [list(names) for names in sources]


def test_a_job_without_buffers_is_as_before() -> None:
    job = job_of(pack(Payload([1], None, None)))
    assert through_the_pipe(job.payload) == replace(job)
    assert unpack(job.payload).source == [1]
