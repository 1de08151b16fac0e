"""The options of `start_worker`: checked, as far as possible before there is a cache, and made into a job."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cachestream.config import SHORTEST_S, check_count, check_seconds, format_size, parse_size
from cachestream.errors import ConfigError
from cachestream.listing.file_list import whole_units
from cachestream.sources.base import Source, as_divisible, as_growing, parts_for_diversity
from cachestream.sources.functions import fingerprint_of
from cachestream.storage.cache import Cache
from cachestream.storage.layout import overhead_bytes
from cachestream.storage.reservations import HEADROOM_BYTES
from cachestream.storage.telemetry import FLIGHTS, PROCESSES_AT_MOST
from cachestream.transport.remote import Remote
from cachestream.worker.job import Job, Payload, pack, pack_sampler
from cachestream.worker.order import Partition, check_curriculum, check_weights, parse_partition
from cachestream.worker.passes import parts_of_last_pass
from cachestream.worker.processes import import_path

CONCURRENCY: Final = 16
HANG_TIMEOUT_S: Final = 30.0
DEFAULT_SHARD: Final = "64MB"
_GROWING: Final = ("shuffle", "sequential")  # orders that can begin before all units are known
_WHEN_FULL: Final = ("evict", "wait", "stop")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of `start_worker` that describe the filling; `start_worker` documents them."""

    num_workers: int | None = None
    shard_size: int | str | None = None
    order: Any = "shuffle"
    bandwidth_limit: int | str | None = None
    when_full: str = "evict"
    concurrency: int = CONCURRENCY
    hang_timeout_s: float = HANG_TIMEOUT_S
    partition: Any = None
    transform: Any = None
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigError for values that are wrong with any cache and source."""
        if self.num_workers is not None:
            check_count("num_workers", self.num_workers, 1, PROCESSES_AT_MOST)
        check_count("concurrency", self.concurrency, 1, FLIGHTS)
        if self.when_full not in _WHEN_FULL:
            raise ConfigError(f"when_full={self.when_full!r}: choose one of {', '.join(_WHEN_FULL)}")
        check_seconds("hang_timeout_s", self.hang_timeout_s, SHORTEST_S)
        if self.transform is not None and not callable(self.transform):
            raise ConfigError(f"transform={self.transform!r}: must be a function of one sample")
        check_count("seed", self.seed, -math.inf)
        if self.shard_size is not None:
            parse_size(self.shard_size, "shard_size")
        self._bandwidth()
        parse_partition(self.partition)
        _kind_of(self.order)

    def job(self, cache: Cache, source: Source) -> Job:
        """The job of the worker that fills `cache` from `source`, by options that `check` has passed.

        Raises ConfigError for options that cannot work with this cache and source.
        """
        partition = parse_partition(self.partition)
        source = self._divided(cache, source)
        growing = as_growing(source) if isinstance(self.order, str) and self.order in _GROWING else None
        source_name = type(source).__name__
        num_units = (
            whole_units(source.num_units, source_name) if growing is None else len(growing.first_names)
        )
        fingerprint: object = source.fingerprint
        if not isinstance(fingerprint, str) or not fingerprint:
            raise ConfigError(
                f"{source_name}: fingerprint={fingerprint!r}: must be a str that names the data"
            )
        _check_share(partition, num_units)
        divisible = as_divisible(source)
        kind, weights, sampler = _order(self.order, num_units, partition)
        policy = cache.eviction if callable(cache.eviction) else None
        protocols: set[str] = set()

        def collect_protocol(value: Any) -> None:
            if isinstance(value, Remote) and not value.is_local:
                protocols.add(value.protocol)

        return Job(
            root=cache.path,
            sys_path=import_path(),
            fingerprint=fingerprint,
            kind=kind,
            seed=int(self.seed),
            num_units=num_units,
            listing=str(
                getattr(source, "listing_digest", "") if growing is None else growing.first_names.digest
            ),
            num_workers=int(self.num_workers or min(4, os.cpu_count() or 1)),
            concurrency=int(self.concurrency),
            shard_bytes=self._shard_bytes(cache),
            bandwidth_bytes_per_s=self._bandwidth(),
            when_full=self.when_full,
            hang_timeout_s=float(self.hang_timeout_s),
            custom_eviction=policy is not None,
            payload=pack(Payload(source, self.transform, policy, weights), collect_protocol),
            sampler=pack_sampler(sampler),
            partition=partition,
            rule=fingerprint_of(self.order) if kind == "curriculum" else "",
            growing=growing is not None,
            label_names=tuple(map(str, getattr(source, "label_names", ()))),
            protocols=tuple(sorted(protocols)),
            rounds=divisible.rounds if kind == "shuffle" and divisible is not None else 1,
        )

    def _divided(self, cache: Cache, source: Source) -> Source:
        """The source, divided into parts so small that the cache holds samples of many units.

        If the cache has had a pass over the source, the number of parts is that of the last pass.
        """
        is_shuffled = isinstance(self.order, str) and self.order == "shuffle"
        divisible = as_divisible(source)
        if divisible is None or divisible.rounds > 1 or not is_shuffled:
            return source
        parts = parts_of_last_pass(cache, source.fingerprint)
        if parts is None:
            unit_bytes, most = divisible.part_limit()
            parts = parts_for_diversity(cache.size_limit, divisible.num_units or 0, unit_bytes, most)
        return divisible.divided(parts) if parts > 1 else source

    def _shard_bytes(self, cache: Cache) -> int:
        usable = cache.size_limit - overhead_bytes(cache.directory) - HEADROOM_BYTES
        if self.shard_size is None:
            return min(parse_size(DEFAULT_SHARD), max(1, usable // 8))
        shard_bytes = parse_size(self.shard_size, "shard_size")
        if not 0 < shard_bytes <= usable:
            raise ConfigError(
                f"shard_size={self.shard_size!r} does not fit a cache of {format_size(cache.size_limit)} "
                f"({format_size(max(0, usable))} of it for shards); raise size_limit or lower shard_size"
            )
        return shard_bytes

    def _bandwidth(self) -> float | None:
        if self.bandwidth_limit is None:
            return None
        bytes_per_s = parse_size(self.bandwidth_limit, "bandwidth_limit")
        if bytes_per_s <= 0:
            raise ConfigError("bandwidth_limit must be above 0; None means no limit")
        return float(bytes_per_s)


def _check_share(partition: Partition | None, num_units: int | None) -> None:
    if partition is not None and num_units is not None and not partition.length(num_units):
        raise ConfigError(
            f"partition={partition}: the source has {num_units} units, too few for every node to get one; "
            "use fewer nodes, or smaller units"
        )


_ORDERS: Final = "weights, a function of progress, or a torch Sampler over units"


def _order(
    order: Any, num_units: int | None, partition: Partition | None
) -> tuple[str, list[float] | None, Any]:
    """The kind of an order, its weights if any, and its sampler or curriculum if any."""
    kind = _kind_of(order)
    if kind == "weighted":
        return kind, check_weights(order, num_units, partition), None
    if kind == "curriculum":
        check_curriculum(order, 0.0, num_units)
    return kind, None, None if isinstance(order, str) else order


def _kind_of(order: Any) -> str:
    """The kind of `order`: "shuffle", "sequential", "weighted", "sampler" or "curriculum".

    Raises ConfigError.
    """
    if isinstance(order, str):
        if order not in _GROWING:
            raise ConfigError(f"order={order!r}: choose 'shuffle' or 'sequential', or give {_ORDERS}")
        return order
    if isinstance(order, Sequence) or hasattr(order, "__array__"):
        return "weighted"
    if isinstance(order, type):
        raise ConfigError(f"order={order!r} is a class: make one of it first")
    if hasattr(order, "__iter__"):
        return "sampler"
    if callable(order):
        return "curriculum"
    raise ConfigError(f"order={order!r}: give 'shuffle', 'sequential', {_ORDERS}")
