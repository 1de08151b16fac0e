"""What a worker is told to do, on its way from the caller to the supervisor to the sampling processes.

It travels through pipes only: the source may hold credentials, which never touch the disk.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Final

import cloudpickle

from cachestream.errors import ConfigError, WorkerError
from cachestream.sampling.partition import Partition

__all__ = [
    "Job",
    "Payload",
    "load_shared",
    "pack",
    "pack_sampler",
    "read_frame",
    "share",
    "unpack",
    "unpack_sampler",
    "write_frame",
]

_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Job:
    """The worker's orders, without the user's objects: these are in `payload`, pickled.

    What only the supervisor needs, the `sampler` or the curriculum, is pickled by itself: it may bring torch.

    `kind`, `seed`, `rule`, `partition`: the order over units, see PassPlan.
    `listing`: the digest of the source's listing. Sizes in bytes, times in seconds.
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
    payload: bytes
    sampler: bytes
    partition: Partition | None = None
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Payload:
    """The user's objects: what is read, what is done to each sample, and what evicts."""

    source: Any
    transform: Any
    eviction: Any
    weights: Any


def pack(payload: Payload) -> bytes:
    """`payload` pickled, lambdas and closures included; raises ConfigError naming what does not pickle."""
    return _pickled(payload, _culprit)


def pack_sampler(sampler: Any) -> bytes:
    """The user's sampler pickled, nothing for None; raises ConfigError if it does not pickle."""
    return b"" if sampler is None else _pickled(sampler, lambda _: None)


def _pickled(value: Any, culprit: Callable[[Any], tuple[str, Exception] | None]) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # noqa: BLE001  pickling runs the user's code
        name, cause = culprit(value) or ("order", error)
        raise ConfigError(
            f"the {name} cannot be sent to the background processes ({type(cause).__name__}: {cause}); "
            "open files, connections, locks and generators inside it, at its first use there"
        ) from cause


def _culprit(payload: Payload) -> tuple[str, Exception] | None:
    """What of `payload` does not pickle, by the name its user knows, and why."""
    names = {"source": "source", "transform": "transform", "eviction": "eviction function"}
    for name in ("source", "transform", "eviction", "weights"):
        try:
            cloudpickle.dumps(getattr(payload, name))
        except Exception as error:  # noqa: BLE001  pickling runs the user's code
            return names.get(name, "order"), error
    return None


def unpack(data: bytes) -> Payload:
    """The user's objects again; raises WorkerError when something they need cannot be imported here."""
    payload = _loaded(data, "source or transform")
    assert isinstance(payload, Payload)
    return payload


def unpack_sampler(data: bytes) -> Any:
    """The user's sampler again; raises WorkerError when something it needs cannot be imported here."""
    return _loaded(data, "order")


def _loaded(data: bytes, what: str) -> Any:
    try:
        return pickle.loads(data)  # noqa: S301  sent by our own parent through a pipe
    except Exception as error:
        raise WorkerError(
            f"the {what} cannot be loaded in the background process ({type(error).__name__}: "
            f"{error}); is the module it comes from importable there?"
        ) from error


def share(job: Job) -> int:
    """The job in memory that children inherit: a descriptor for `load_shared`.

    Pickled once, whatever the number of processes and restarts, and nobody waits for a reader: through a
    pipe a large listing would block the supervisor until each child has started.
    """
    fd = os.memfd_create("cachestream-job", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        pickle.dump(job, file)
    return fd


def load_shared(fd: int) -> Job:
    """The job behind a descriptor of `share`; closes it."""
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            job: Job = pickle.loads(memory)  # noqa: S301  shared by our own parent
    finally:
        os.close(fd)
    return job


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Send one value through a pipe."""
    data = pickle.dumps(value)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """Receive one value; raises EOFError when the other side is gone."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError("the pipe was closed")
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError("the pipe was closed")
    return pickle.loads(data)  # noqa: S301  sent by our own parent or child through a pipe
