"""The job of a worker, sent from the caller to the supervisor and on to the sampling processes.

A job travels through pipes and shared memory only: its source may hold credentials, which never touch the
disk.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cachestream.errors import ConfigError, WorkerError
from cachestream.sources.user_code import by_value
from cachestream.worker.order import Partition
from cachestream.worker.processes import LENGTH

_OUT_OF_BAND_BYTES: Final = 64 * 1024  # buffers of at least this size are sent beside their pickle
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickle, and large read-only buffers beside it, such as the names of a listing.

    All processes map one copy of the buffers, that of `share`.
    """

    data: bytes
    buffers: tuple[bytes | memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """The options of a worker, checked and complete. Sizes in bytes, times in seconds.

    `payload`: the user's objects, pickled. `sampler`: the sampler or curriculum, which only the supervisor
    needs, pickled by itself because it may import torch.

    `kind`, `seed`, `rule`, `partition`: the order over units, see PassPlan. `round_ends`: see
    DivisibleSource: each round reads a share of every file. `listing`: the digest of the names of the source;
    of its first `num_units` names only if the source is `growing`. `label_names`: the names that the labels
    of the source are indices of, if it has any. `protocols`: the names of the fsspec drivers that read the
    source. `source_module`: the module of its class if that is ours.
    """

    root: str
    sys_path: tuple[str, ...]
    fingerprint: str
    kind: str
    seed: int
    num_units: int | None
    listing: str
    num_workers: int
    concurrency: int
    shard_bytes: int
    bandwidth_bytes_per_s: float | None
    when_full: str
    hang_timeout_s: float
    custom_eviction: bool
    payload: Packed
    sampler: bytes
    partition: Partition | None = None
    rule: str = ""
    growing: bool = False
    label_names: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    source_module: str = ""
    round_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Payload:
    """The user's objects: the source, the transform, the eviction function and the weights of the order."""

    source: Any
    transform: Any
    eviction: Any
    weights: Any


def pack(payload: Payload, visit: Callable[[Any], None] = lambda _: None) -> Packed:
    """Pickle `payload`, including lambdas and closures.

    `visit` is called with each object in the payload. Raises ConfigError that names the object that does not
    pickle.
    """
    buffers: list[bytes] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if not view.readonly or view.nbytes < _OUT_OF_BAND_BYTES or not view.contiguous:
                return True  # each process gets its own copy of a writable buffer
            buffers.append(view.tobytes())
            return False

    return Packed(_pickled(payload, in_band, visit), tuple(buffers))


def pack_sampler(sampler: Any) -> bytes:
    """Pickle the user's sampler (b"" for None); raises ConfigError if that fails."""
    return b"" if sampler is None else _pickled(sampler)


def _pickled(
    value: Any,
    buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
    visit: Callable[[Any], None] = lambda _: None,
) -> bytes:
    try:
        return by_value(value, buffer_callback, visit)
    except Exception as error:  # noqa: BLE001  pickling runs the user's code
        name, cause = ("order", error) if not isinstance(value, Payload) else _culprit(value, error)
        raise ConfigError(
            f"the {name} cannot be sent to the background processes ({type(cause).__name__}: {cause}); "
            "open files, connections, locks and generators inside it, at its first use there"
        ) from cause


def _culprit(payload: Payload, error: Exception) -> tuple[str, Exception]:
    """The user's name for the object in `payload` that does not pickle, and its error."""
    for attribute in ("source", "transform", "eviction", "weights"):
        try:
            by_value(getattr(payload, attribute))
        except Exception as cause:  # noqa: BLE001  pickling runs the user's code
            return {"eviction": "eviction function", "weights": "order"}.get(attribute, attribute), cause
    return "order", error


def unpack(packed: Packed) -> Payload:
    """Unpickle the user's objects; raises WorkerError if a module that they need cannot be imported here."""
    payload = _loaded(packed.data, "source or transform", packed.buffers)
    assert isinstance(payload, Payload)
    return payload


def unpack_sampler(data: bytes) -> Any:
    """Unpickle the user's sampler; raises WorkerError if a module that it needs cannot be imported here."""
    return _loaded(data, "order")


def _loaded(data: bytes, what: str, buffers: Sequence[bytes | memoryview] = ()) -> Any:
    try:
        return pickle.loads(data, buffers=buffers)  # noqa: S301  sent by our own parent through a pipe
    except Exception as error:
        raise WorkerError(
            f"the {what} cannot be loaded in the background process ({type(error).__name__}: "
            f"{error}); is the module it comes from importable there?"
        ) from error


def share(job: Job) -> int:
    """Write the job to memory that children inherit; returns a descriptor for `load_shared`.

    The job is pickled once, whatever the number of processes and restarts. Through a pipe, a large listing
    would block the supervisor until each child has started.
    """
    fd = os.memfd_create("cachestream-job", os.MFD_CLOEXEC)
    sizes = [len(buffer) for buffer in job.payload.buffers]
    head = pickle.dumps((replace(job, payload=Packed(job.payload.data)), sizes))
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(LENGTH.pack(len(head)) + head)
        for buffer in job.payload.buffers:
            file.seek(_aligned(file.tell()))
            file.write(buffer)
    return fd


def load_shared(fd: int) -> Job:
    """Load the job from a descriptor of `share`, and close the descriptor.

    The buffers are mapped, not copied.
    """
    try:
        memory = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
    (length,) = LENGTH.unpack(memory[: LENGTH.size])
    end = LENGTH.size + length
    job, sizes = pickle.loads(memory[LENGTH.size : end])  # noqa: S301  shared by our own parent
    buffers = []
    for size in sizes:
        start = _aligned(end)
        end = start + size
        buffers.append(memory[start:end])
    shared: Job = replace(job, payload=Packed(job.payload.data, tuple(buffers)))
    return shared


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
