"""SPDL: a pipeline of threads that gather whole batches out of a memory-mapped array.

As its documentation advises: the source yields the indices of a batch, one call without the interpreter's lock makes
the batch, in as many threads as there are cores, and the source goes on into the next epoch by itself. With a
worker, the pipeline runs in a process of its own and hands batches over in a pool of shared memory; this process then
ends with tracebacks of Python's resource tracker, which cost nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spdl.pipeline import PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess
from torch.utils.data import BatchSampler, RandomSampler

from benchmarks.peers.memmap import Batched, prepare
from benchmarks.peers.workload import Epochs, Workload

__all__ = ["deliver", "prepare"]

_BUFFERED = 3  # batches that are ready, as in its examples
_LABEL_BYTES = 8
_SPARE_BYTES = 64 << 10  # of a segment, for what the pool adds to a batch


@contextmanager
def deliver(folder: Path, work: Workload, workers: int, option: str) -> Iterator[Epochs]:
    dataset = Batched(folder, work)
    threads = len(os.sched_getaffinity(0))
    pipeline = (
        PipelineBuilder()
        .add_source(BatchSampler(RandomSampler(dataset), work.batch, drop_last=False), continuous=True)
        .pipe(dataset, concurrency=threads)
        .add_sink(_BUFFERED)
    )
    if workers:
        batch_bytes = work.batch * (work.sample_bytes + _LABEL_BYTES)
        pool = SharedMemorySegmentPool(batch_bytes + _SPARE_BYTES, 2 * (threads + _BUFFERED))
        yield run_pipeline_in_subprocess(pipeline.get_config(), num_threads=threads, arena=pool)
        return
    running = pipeline.build(num_threads=threads, use_thread_output_queue=True)
    with running.auto_stop():
        yield running
