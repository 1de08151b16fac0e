"""The part of each shard that a reader asks for: the rows where a condition holds, and some fields.

A condition is evaluated once a shard, over the columns that it reads, and its rows are remembered until the
shard leaves the cache. A snapshot carries the rows of its shards, and no function, to other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from cachestream.errors import CacheStreamError, ConfigError, CorruptShardError, RankMismatchError
from cachestream.schema import KEY_FIELD, IntArray, Schema, Snapshot, Split
from cachestream.storage.shard import MappedShard, ShardColumns, shard_path

if TYPE_CHECKING:
    from cachestream.storage.cache import Cache

Condition = Callable[[ShardColumns], Any]


class View:
    """The rows of `where` and of a split, and the fields `columns`, in this order; None: all.

    Used by one thread, for one cache and one split, unless it is `ALL`, which has neither.
    """

    def __init__(self, where: Condition | None = None, columns: tuple[str, ...] | None = None) -> None:
        self._where = where
        self._columns = columns
        self._rows: dict[int, npt.NDArray[np.int32]] = {}  # selected, of each shard

    @property
    def selects(self) -> bool:
        """True if there is a condition."""
        return self._where is not None

    def evaluate(self, cache: Cache, split: Split | None, rows: str = "live") -> int:
        """Evaluate the condition on the shards in the view `rows` of the catalogue that are new; return the
        number of rows selected in those that are live.

        What is known of a replaced shard stays: an epoch of it may be restored. Damaged shards are
        quarantined.
        """
        with cache.catalogue.reading() as tables:
            (live,), (cached,) = (tables.shard_columns("id", view=one) for one in ("live", "whole"))
        for shard_id, error in self._remember(cache.path, cached if rows == "whole" else live, split, cached):
            cache.quarantine(shard_id, str(error))  # does nothing if the shard was evicted meanwhile
        return int(np.maximum(self.counts(live), 0).sum())

    def counts(self, shard_ids: IntArray) -> IntArray:
        """The number of rows selected in each shard, int64 `[n]`; -1 where no condition was evaluated."""
        counts = [-1 if (rows := self._rows.get(i)) is None else len(rows) for i in shard_ids.tolist()]
        return np.array(counts, np.int64)

    def fields_of(self, schema: Schema) -> Schema:
        """The fields of the view. Raises ConfigError for a name that is no field of `schema`."""
        return schema if self._columns is None else schema.only(self._columns, "columns=")

    def apply(self, snapshot: Snapshot) -> Snapshot:
        """The `snapshot` with the rows of its shards."""
        if not self.selects:
            return snapshot
        known = [self._rows[shard_id] for shard_id in snapshot.shard_ids.tolist()]
        return replace(snapshot, rows=np.concatenate([np.empty(0, np.int64), *known]))

    def join(self, snapshot: Snapshot, expected: int) -> Snapshot:
        """As `apply`, for another rank's snapshot, whose rows have the hash `expected`."""
        ids = snapshot.shard_ids
        for _, error in self._remember(snapshot.root, ids, snapshot.split, ids):
            raise error
        found = self.apply(snapshot)
        if hash_of(found.rows) != expected:
            selected = 0 if found.rows is None else len(found.rows)
            raise RankMismatchError(
                f"where= selects {selected} samples on this rank and {snapshot.num_samples} on the first "
                "rank of the cache, or different ones: give all ranks the same condition, without randomness"
            )
        return found

    def check(self, cache: Cache, split: Split | None, shard_ids: IntArray, hashes: IntArray) -> None:
        """Raise ConfigError if the rows of a shard are not those with these `hashes` (of `row_hashes`)."""
        self.evaluate(cache, split, "whole")
        for shard_id, expected in zip(shard_ids.tolist(), hashes.tolist(), strict=True):
            rows = self._rows.get(shard_id)
            if rows is not None and hash_of(rows) != expected:
                raise ConfigError(
                    f"where= selects other samples of shard {shard_id} than when this epoch was drawn: "
                    "give the same condition, or begin a new epoch"
                )

    def _remember(
        self, root: str, shard_ids: IntArray, split: Split | None, kept: IntArray
    ) -> list[tuple[int, CorruptShardError]]:
        """Forget the rows of all shards but `kept`, and evaluate those of `shard_ids` that are new; return
        the damaged ones.
        """
        if not self.selects:
            return []
        known, damaged = self._rows, []
        self._rows = {shard_id: known[shard_id] for shard_id in kept.tolist() if shard_id in known}
        for shard_id in shard_ids.tolist():
            if shard_id in self._rows:
                continue
            try:
                self._rows[shard_id] = self._select(MappedShard(shard_path(root, shard_id)), split)
            except CorruptShardError as error:
                damaged.append((shard_id, error))
        return damaged

    def _select(self, shard: MappedShard, split: Split | None) -> npt.NDArray[np.int32]:
        assert self._where is not None
        try:
            mask = np.asarray(self._where(ShardColumns(shard)))
        except CacheStreamError:
            raise
        except Exception as error:
            raise ConfigError(
                f"where= failed on the {shard.num_samples} samples of {shard.path}: "
                f"{type(error).__name__}: {error}; it gets the columns of a shard (arrays), and returns "
                "which samples to take, such as columns['label'] == 3"
            ) from error
        if mask.dtype != np.bool_ or mask.shape != (shard.num_samples,):
            raise ConfigError(
                f"where= returned {mask.dtype} {list(mask.shape)} for a shard of {shard.num_samples} "
                f"samples: return a mask, bool [{shard.num_samples}], such as columns['label'] == 3"
            )
        rows = np.flatnonzero(mask)
        if split is not None:
            rows = np.intersect1d(rows, split.rows(shard.key_hashes()), assume_unique=True)
        return rows.astype(np.int32)


ALL: Final = View()


def make_view(where: object, columns: object) -> View:
    """The view for `where=` and `columns=`. Raises ConfigError for what cannot be one."""
    if where is not None and not callable(where):
        raise ConfigError(
            f"where={where!r}: give a function of a shard's columns that returns a mask, such as "
            "lambda columns: columns['label'] == 3"
        )
    if columns is None:
        return View(where, None)
    names = tuple(columns) if isinstance(columns, list | tuple) else ()
    is_list = names and len(set(names)) == len(names) and all(isinstance(name, str) for name in names)
    if not is_list or KEY_FIELD in names:
        raise ConfigError(
            f"columns={columns!r}: give a list of fields, each once, such as ['image', 'label']; keys come "
            "with with_keys=True"
        )
    return View(where, names)


def row_hashes(snapshot: Snapshot) -> IntArray | None:
    """A hash of the rows of each shard, int64 `[num_shards]`; None without a condition."""
    if snapshot.rows is None:
        return None
    parts = np.split(snapshot.rows, np.cumsum(snapshot.counts)[:-1])
    return np.array([hash_of(part) for part in parts], np.int64)


def hash_of(rows: npt.NDArray[Any] | None) -> int:
    """A hash of `rows`, from 0 to 2**63 - 1; 0 for None, without a condition."""
    return 0 if rows is None else xxhash.xxh3_64_intdigest(rows.astype("<i4").tobytes()) >> 1
