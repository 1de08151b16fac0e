"""The job of a worker, sent from the caller to the supervisor, whose processes inherit it.

A job travels through a pipe only: its source may hold credentials, which never touch the disk.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.errors import ConfigError, WorkerError
from cachestream.sources.user_code import by_value
from cachestream.worker.cluster import ClusterOptions
from cachestream.worker.order import Partition

_OUT_OF_BAND_BYTES: Final = 64 * 1024  # buffers of at least this size are sent beside their pickle


@dataclass(frozen=True, slots=True)
class Packed:
    """A pickle, and large read-only buffers beside it, such as the names of a listing.

    All processes of a worker share one copy of the buffers.
    """

    data: bytes
    buffers: tuple[bytes | memoryview, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """The options of a worker, checked and complete. Sizes in bytes, times in seconds.

    `payload`: a Payload, pickled. `sampler`: the sampler or curriculum, if there is one; it is pickled by
    itself, as only the supervisor needs it and it may import torch.

    `kind`, `seed`, `rule`, `partition`: the order over units, see PassPlan. `round_ends`: see
    DivisibleSource. `listing`: the digest of the names of the source, or of its first `num_units` names if
    the source is `growing`. `label_names`: the names of the labels, if the source has any. `protocols`: the
    names of the fsspec drivers that read the source. `source_module`: the module of the source's class, if
    that is one of this package. `trace`: the folder of the caller's trace, if there is one. `cluster`: what a
    Ray cluster does in the filling; None without one. `mix`: the integer weights of the sources of a `mix`,
    if these are fetched as loaders draw them; else empty. `transform`: see `identity_of_samples`. `weights`:
    those of the units, float64 `[num_units]`, for an order by weights. `has_names`: the units have names, all
    of which are known by now. `on_change`: "replace", "keep" or "refuse", see `start_worker`. `data`: the part
    of the fingerprint that names the data, whatever samples are made of it.
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
    sampler: Packed | None
    partition: Partition | None = None
    rule: str = ""
    growing: bool = False
    label_names: tuple[str, ...] = ()
    protocols: tuple[str, ...] = ()
    source_module: str = ""
    round_ends: tuple[int, ...] = ()
    trace: str = ""
    cluster: ClusterOptions | None = None
    mix: tuple[int, ...] = ()
    transform: str = ""
    weights: npt.NDArray[np.float64] | None = None
    has_names: bool = False
    on_change: str = "keep"
    data: str = ""

    @property
    def replaces(self) -> bool:
        """True if samples of other transforms are to be replaced.

        The caches of a group keep theirs: they have one pass in common.
        """
        return self.on_change == "replace" and not (self.cluster is not None and self.cluster.group)


@dataclass(frozen=True, slots=True)
class Payload:
    """The user's objects: the source, the transform and the eviction function."""

    source: Any
    transform: Any
    eviction: Any


def pack(value: Any, visit: Callable[[Any], None] = lambda _: None) -> Packed:
    """Pickle a Payload or an order, including lambdas and closures.

    `visit` is called with each object in the value. Raises ConfigError that names the object that does not
    pickle.
    """
    buffers: list[bytes] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        with memoryview(buffer) as view:
            if not view.readonly or view.nbytes < _OUT_OF_BAND_BYTES or not view.contiguous:
                return True  # each process gets its own copy of a writable buffer
            buffers.append(view.tobytes())
            return False

    try:
        return Packed(by_value(value, in_band, visit), tuple(buffers))
    except Exception as error:  # noqa: BLE001  pickling runs the user's code
        name, cause = _culprit(value, error)
        raise ConfigError(
            f"the {name} cannot be sent to the background processes ({type(cause).__name__}: {cause}); "
            "open files, connections, locks and generators inside it, at its first use there"
        ) from cause


def _culprit(value: Any, error: Exception) -> tuple[str, Exception]:
    """The user's name for the object in `value` that does not pickle, and its error."""
    if isinstance(value, Payload):
        parts = {"source": value.source, "transform": value.transform, "eviction function": value.eviction}
        for name, part in parts.items():
            try:
                by_value(part)
            except Exception as cause:  # noqa: BLE001  pickling runs the user's code
                return name, cause
    return "order", error


def unpack(packed: Packed, what: str = "source or transform") -> Any:
    """Unpickle the value; raises WorkerError if a module that it needs cannot be imported here."""
    try:
        return pickle.loads(packed.data, buffers=packed.buffers)  # noqa: S301  sent by our own parent
    except Exception as error:
        raise WorkerError(
            f"the {what} cannot be loaded in the background process ({type(error).__name__}: "
            f"{error}); is the module it comes from importable there?"
        ) from error
