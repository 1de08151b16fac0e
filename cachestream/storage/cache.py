"""The public class of a cache: open it, observe it, limit it, make space, take snapshots, keep it sound."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

import cachestream
from cachestream.config import check_count, check_seconds, check_share, format_size, parse_size
from cachestream.errors import CacheError
from cachestream.storage.eviction import EvictionPolicy, check_policy
from cachestream.storage.filling import Filling
from cachestream.storage.layout import Directory, move_aside, open_directory, remove_if_there
from cachestream.storage.locks import locked
from cachestream.storage.os_errors import translated_disk_errors
from cachestream.storage.recovery import (
    VerifyReport,
    check_sizes,
    count_strays,
    open_catalogue,
    rebuild_catalogue,
    remove_leftovers,
    seal_catalogue,
    verify,
)
from cachestream.storage.reservations import HEADROOM_BYTES, Owner, Reservations, room_in
from cachestream.storage.settings import (
    change_settings,
    choose_split,
    parse_limit,
    read_settings,
    write_settings,
)
from cachestream.storage.shard import shard_path
from cachestream.storage.snapshots import SnapshotRequest, restore_snapshot, take_snapshot
from cachestream.storage.status import (
    CacheStatus,
    has_worker,
    occupied_bytes,
    read_filling,
    read_status,
    wait_for_samples,
)
from cachestream.storage.tables import DOOMED, REPLACED
from cachestream.storage.view import ALL, View, make_view

if TYPE_CHECKING:
    from typing_extensions import Self

    from cachestream.schema import Schema, Snapshot, Split
    from cachestream.storage.leases import Lease
    from cachestream.storage.os_errors import CatalogueDamagedError
    from cachestream.storage.tables import Tables
    from cachestream.storage.view import Condition
    from cachestream.training.dataset import EpochDataset

logger = logging.getLogger("cachestream")


_CLEAR_TIMEOUT_S: Final = 1.0
_WRITERS_TIMEOUT_S: Final = 2.0
_POLL_S: Final = 0.01
_CHECKED_SHARDS: Final = 1000  # at opening; the worker and `verify` check all


class Cache:
    """A directory of shards on a local disk, bounded by a hard limit; many processes may open one.

    Args:
        path: the directory, created if need be. One cache, one directory of its own.
        size_limit: bytes, or text such as "200GB", that the whole directory never exceeds. It is stored
            in the cache; None leaves the stored one (80 % of the free disk for a new cache).
        min_free: bytes of the disk that stay free whatever the limit says ("1GB" for a new cache;
            None leaves the stored value).
        eviction: which shards go when space is needed: "lru" (for a new cache; None leaves the stored
            one), "fifo", "least-fresh" (the most often trained on go first), "least-weight" (by the
            weights of a loader with `weights=`), "none" (filling stops when full), or a function that
            gets the evictable shard rows and returns those to evict, first to go first.

    Raises ConfigError for a place or a limit that cannot work, CacheVersionError for a cache of a newer
    cachestream. Thread-safe, picklable (a copy opens the cache again), usable after a fork.
    """

    @cachestream.config.suggests_names(name="Cache")
    def __init__(
        self,
        path: str | os.PathLike[str],
        size_limit: int | str | None = None,
        *,
        min_free: int | str | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self._eviction = eviction if callable(eviction) else None  # a name is stored in the cache
        given = {
            "size_limit": None if size_limit is None else parse_limit(size_limit),
            "min_free": None if min_free is None else parse_size(min_free, "min_free"),
            "eviction": None if eviction is None or callable(eviction) else check_policy(eviction),
        }
        self.directory: Directory = open_directory(path)
        self.catalogue = open_catalogue(self.directory)
        self.reservations = Reservations(self.directory, self.catalogue, self._policy)
        self.filling = Filling(self.directory, self.catalogue)
        stored = read_settings(self.directory)
        self.cache_id = stored.cache_id
        changed = {key: value for key, value in given.items() if value not in (None, getattr(stored, key))}
        if changed:
            change_settings(self.directory, self.catalogue, **changed)
        with suppress(CacheError):  # not writable, or locked
            if (problem := self.check_sizes(_CHECKED_SHARDS)) is not None:
                logger.warning("%s: %s; corrected", self.path, problem)
        if "size_limit" in changed:
            self._shrink()
        elif size_limit is not None:
            self.enforce_limit()

    def _setting(self, key: str) -> Any:
        return getattr(read_settings(self.directory), key)

    def _policy(self, tables: Tables) -> EvictionPolicy:
        return self._eviction or tables.settings.eviction

    # --- what is there

    @property
    def path(self) -> str:
        """The absolute path of the directory."""
        return self.directory.root

    @property
    def size_bytes(self) -> int:
        """The disk usage of the directory, catalogue and temporary files included."""
        return occupied_bytes(self)

    @property
    def num_samples(self) -> int:
        """Samples in published shards."""
        with self.catalogue.reading() as tables:
            return tables.totals()[1]

    @property
    def num_shards(self) -> int:
        """Published shards."""
        with self.catalogue.reading() as tables:
            return tables.totals()[0]

    @property
    def schema(self) -> Schema | None:
        """The fields of a sample; None while the cache is empty."""
        with self.catalogue.reading() as tables:
            return tables.schema

    @property
    def eviction(self) -> EvictionPolicy:
        """The eviction policy in force.

        Setting it takes effect at once: a name for all processes, a function for this one and the workers
        that it starts afterwards.
        """
        with self.catalogue.reading() as tables:
            return self._policy(tables)

    @eviction.setter
    def eviction(self, eviction: EvictionPolicy) -> None:
        if not callable(eviction):
            change_settings(self.directory, self.catalogue, eviction=check_policy(eviction))
        self._eviction = eviction if callable(eviction) else None

    @property
    def min_free(self) -> int:
        """The bytes of the disk that stay free.

        Setting it (bytes or "5GB") takes effect at once, also for running workers.
        """
        return int(self._setting("min_free"))

    @min_free.setter
    def min_free(self, min_free: int | str) -> None:
        change_settings(self.directory, self.catalogue, min_free=parse_size(min_free, "min_free"))

    @property
    def size_limit(self) -> int:
        """The limit in bytes.

        Setting it (bytes or "200GB") takes effect at once, also for running workers. Lowering it waits for
        the shards that are being written (2 s at most) and evicts down to it, except for the shards of epochs
        in use, which are evicted when these end. Until then the cache may take more than the limit: what it
        took before, and the reserve of 256 KiB for leases and logs.
        """
        return int(self._setting("size_limit"))

    @size_limit.setter
    def size_limit(self, size_limit: int | str) -> None:
        change_settings(self.directory, self.catalogue, size_limit=parse_limit(size_limit))
        self._shrink()

    def fill_state(self) -> str:
        """The state of the filling: "filling", "complete", "full", "stopped", "failed" or "none" at first."""
        return read_filling(self)[0]

    def has_worker(self) -> bool:
        """Return whether a worker is running for this cache, in any process."""
        return has_worker(self.directory)

    def status(self) -> CacheStatus:
        """Everything at a glance; `str()` of it is one line, `.to_dict()` is JSON."""
        return read_status(self)

    def wait(self, min_samples: int = 1, timeout_s: float | None = None) -> int:
        """Wait until `min_samples` are cached; returns the number of cached samples.

        Without `timeout_s` there is no deadline: the wait lasts as long as samples may come, also while no
        worker runs, and after some seconds a warning says why none come. Raises NotEnoughSamplesError at the
        deadline, or at once when the filling has ended with fewer samples, or no more fit.
        """
        count = check_count("min_samples", min_samples, 0)
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        return wait_for_samples(self, count, math.inf if timeout_s is None else timeout_s)

    # --- epochs

    def snapshot(
        self,
        epoch_size: int | None = None,
        *,
        turnover: float = 0.25,
        split: str | None = None,
        holdout: float | None = None,
        where: Condition | None = None,
        columns: Sequence[str] | None = None,
    ) -> EpochDataset:
        """A frozen, leased, map-style dataset of the samples cached now: `len()`, `[i]`, any torch sampler.

        With a smaller `epoch_size`, it consists of the least used shards that cover it. When the cache is
        full and the filling goes on, the `turnover` share that eviction would take first is left out.
        `split`, `holdout`, `where` and `columns` as in `EpochLoader`. Raises NotEnoughSamplesError when the
        cache is empty, or nothing is selected, and ConfigError for arguments that cannot work.
        """
        view = make_view(where, columns)
        chosen = choose_split(self, split, holdout)
        return cachestream.EpochDataset(*self.take_snapshot(epoch_size, turnover, split=chosen, view=view))

    def take_snapshot(
        self,
        epoch_size: int | None = None,
        turnover: float = 0.0,
        min_samples: int = 0,
        own_leases: Collection[str] = (),
        split: Split | None = None,
        view: View = ALL,
    ) -> tuple[Snapshot, Lease]:
        """The values behind `snapshot`: the shards, and the lease that holds them.

        Fewer shards are left out for the `turnover` where less than `min_samples` would remain. `own_leases`
        are the paths of leases that the caller releases soon.
        """
        if epoch_size is not None:
            epoch_size = check_count("epoch_size", epoch_size)
        check_share("turnover", turnover)
        return take_snapshot(
            self, SnapshotRequest(epoch_size, turnover, min_samples, own_leases, split, view)
        )

    def restore_snapshot(
        self,
        shard_ids: npt.ArrayLike,
        counts: npt.ArrayLike,
        split: Split | None = None,
        view: View = ALL,
    ) -> tuple[Snapshot, Lease, list[int]]:
        """Lease the shards of an earlier snapshot again; also returns the ids that are gone."""
        ids, expected = np.asarray(shard_ids, np.int64), np.asarray(counts, np.int64)
        return restore_snapshot(self, ids, expected, split, view)

    # --- space and soundness

    def evict(self, to: int | str | None = None) -> int:
        """Evict shards until the cache takes at most `to` bytes; returns the bytes freed.

        None means the limit, or what `min_free` leaves of it. Leased shards stay. The policy "none" evicts
        as "lru" here, because it was asked for.
        """
        # `to` is the disk usage of the directory, without the reserve that counts as used.
        to_bytes = None if to is None else parse_size(to, "to") + self.reservations.measure().headroom_bytes
        return self.reservations.evict(to_bytes, "lru" if self.eviction == "none" else None)

    def enforce_limit(self) -> int:
        """Evict down to the limit, as leases allow; returns the bytes freed. Replaced shards go, too.

        Leases and logs may use a part of their reserve over the limit without an eviction.
        """
        return self.reservations.clear_replaced() + self._evict_surplus(HEADROOM_BYTES // 2)

    def _evict_surplus(self, slack_bytes: int = 0) -> int:
        """If usage exceeds the limit by more than `slack_bytes`, evict down to it; return the bytes freed."""
        usage = self.reservations.measure()
        with self.catalogue.reading() as tables:
            room, size_limit = room_in(tables, usage), tables.settings.size_limit
            never_evicts = self.reservations.policy(tables) == "none"
            doomed_bytes = tables.bytes_in(DOOMED)
        # Under "none" only a lower limit evicts, not a disk that other programs fill.
        limit_bytes = size_limit if never_evicts else room.limit_bytes
        slack_bytes = slack_bytes if limit_bytes == size_limit else 0
        if room.used_bytes - doomed_bytes <= limit_bytes + slack_bytes:
            return 0
        return self.reservations.evict(limit_bytes, "lru" if never_evicts else None)

    def _shrink(self) -> None:
        """Enforce a limit that was just lowered, also for bytes that were promised before."""
        self._evict_surplus()
        if self.reservations.room().free_bytes < 0:
            deadline_s = time.monotonic() + _WRITERS_TIMEOUT_S
            pending = self._reserved_ids()
            while pending and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)  # SQLite cannot notify
                pending &= self._reserved_ids()
            self._evict_surplus()

    def _reserved_ids(self) -> set[int]:
        with self.catalogue.reading() as tables:
            return {row.id for row in tables.unfinished()}

    def quarantine(self, shard_id: int, reason: str = "") -> None:
        """Move a damaged shard to the quarantine and delete its row: the worker fetches its samples again.

        A shard that is gone already is ignored.
        """
        path = shard_path(self.path, shard_id)
        finding = reason.partition("; run ")[0]  # without the advice, which is followed here
        where, _, damage = finding.partition(": ")
        is_missing = not os.path.lexists(path)
        # The file is moved once the row is doomed: a live row has its file wherever this process dies. The row
        # has an owner until then: whoever finds a doomed row without one removes the file, the evidence.
        with Owner.temporary(self.directory, "quarantine") as owner:
            with self.catalogue.transaction() as tables:
                question = "SELECT num_samples, state FROM whole WHERE id = ?"
                row = tables.execute(question, (shard_id,)).fetchone()
                if row is None:
                    return  # evicted, or quarantined by another rank
                tables.doom([shard_id], owner.name)
                # In the same transaction: an uncounted loss would not be fetched again. Other shards hold the
                # samples of a replaced one.
                tables.add("evicted_shards", int(row[1] != REPLACED))
                tables.add("quarantined", int(not is_missing))
                tables.add_failure("quarantined", damage or "damaged", row[0], where)
                limit_bytes = tables.settings.size_limit
            move_aside(self.directory, path, limit_bytes)
            with self.catalogue.transaction() as tables:
                tables.forget([shard_id])

    def verify(
        self, repair: bool = False, on_progress: Callable[[int, int], None] | None = None
    ) -> VerifyReport:
        """Check every shard against its checksums, and the catalogue against the directory.

        With `repair`, a damaged catalogue is rebuilt, damaged shards are quarantined, rows of lost ones
        deleted and unknown files removed. `on_progress(done, total)` is called for each shard.
        """
        return verify(self, repair, on_progress)

    def rebuild(self, error: CatalogueDamagedError | None = None) -> None:
        """Rebuild a lost or damaged catalogue from the shards after `error`, unless it is sound by now."""
        rebuild_catalogue(self.directory, self.catalogue, error)

    def check_sizes(self, newest: int | None = None) -> str | None:
        """Correct the recorded sizes of shards by their files; returns the first error found, or None.

        With `newest`, only that many shards are looked at, and all only if something is wrong.
        """
        if newest is None:
            count_strays(self.directory, self.catalogue)
        return check_sizes(self.directory, self.catalogue, correct=True, newest=newest)

    def recover(self) -> int:
        """Remove the leftovers of writers that died; returns the number of files removed."""
        self.reservations.clear_dead()
        return remove_leftovers(self.directory, self.catalogue)

    def clear(self) -> None:
        """Remove all samples, the quarantine, and the progress of the filling; settings stay.

        Raises CacheError while a worker runs, or while epochs hold shards; all other shards are gone then.
        """
        directory = self.directory
        busy = CacheError(f"a worker is filling {self.path}; stop it first ('cachestream stop CACHE')")
        # The worker's lock: none can start meanwhile.
        with locked(directory.supervisor_lock, _CLEAR_TIMEOUT_S, busy):
            self.reservations.evict(0, "fifo")
            with self.catalogue.transaction() as tables:
                left, _, left_bytes = tables.totals("whole")
                if left:
                    raise CacheError(
                        f"{left} shards ({format_size(left_bytes)}) of {self.path} are leased by epochs in "
                        "use; close them"
                    )
                tables.forget_filling()
                # The next samples may be split otherwise.
                write_settings(directory, replace(tables.settings, holdout=None))
            with translated_disk_errors(self.path, "clearing it"):
                for name in os.listdir(directory.quarantine):
                    remove_if_there(os.path.join(directory.quarantine, name))

    def close(self) -> None:
        """Close the catalogue; the next use opens it again.

        A cache that was closed before the machine restarts keeps the place in its pass and its statistics.
        """
        if self.catalogue.has_committed and os.path.exists(self.catalogue.path):
            with suppress(CacheError):
                seal_catalogue(self.directory, self.catalogue)
        self.catalogue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Cache, self.path, eviction=self._eviction), ()

    def __repr__(self) -> str:
        with self.catalogue.reading() as tables:
            shards, samples, used_bytes = tables.totals()
        return (
            f"<Cache {self.path}: {samples} samples in {shards} shards, {format_size(used_bytes)} of "
            f"{format_size(self.size_limit)}, {self.reservations.leases.count()} leases>"
        )

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()
