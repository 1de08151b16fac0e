"""Sample weights by key, which persist over epochs, evictions and new samples.

A key is stored as its 64-bit hash, so a weight takes 12 bytes. An epoch of n samples draws each sample `n * w
/ sum(w)` times, rounded up or down at random (systematic sampling, Madow 1949), so that equal weights draw
every sample once.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from cachestream.errors import ConfigError
from cachestream.permutation import Permutation, mix_key
from cachestream.schema import IntArray, Snapshot
from cachestream.storage.shard import MappedShard, ShardValues
from cachestream.training.ranks import pack_numbers, unpack_numbers

if TYPE_CHECKING:
    from cachestream.training.ranks import Ranks

_OFFSET_KEY: Final = 1
_SHUFFLE_KEY: Final = 2

Hashes = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Weighted = tuple[Hashes, npt.NDArray[np.float32]]  # of keys, and their weights
Packed = dict[str, str]  # hashes and float32 weights in base64, for JSON in stores and checkpoints


class KeyWeights:
    """The weights of all keys that were ever given one. Thread-safe.

    Updates are pending until the next epoch is prepared, when all ranks exchange them.
    """

    def __init__(self, initial: Mapping[str, float] | None = None) -> None:
        self._lock = threading.Lock()
        self._known: Weighted = np.empty(0, np.uint64), np.empty(0, np.float32)
        self._pending: list[Weighted] = []
        self._sent = 0
        self._hashes = ShardValues(MappedShard.key_hashes, np.uint64(0))
        if initial:
            self.update(list(initial), list(initial.values()))

    def update(self, keys: Sequence[str], values: Any) -> None:
        """Give `keys` the weights `values`: numbers, an array or a tensor `[n]`; raises ConfigError."""
        try:
            given = torch.as_tensor(values, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"weights={reprlib.repr(values)}: give numbers, an array or a tensor [n] ({error})"
            ) from error
        weights = given.detach().to("cpu", torch.float32).numpy().reshape(-1).copy()
        if isinstance(keys, str) or not hasattr(keys, "__len__"):
            raise ConfigError(f"update_weights() got the keys {reprlib.repr(keys)}: give a list of str")
        if len(keys) != len(weights):
            raise ConfigError(
                f"update_weights() got {len(keys)} keys and {len(weights)} values: give one for each"
            )
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ConfigError("update_weights(): weights must be finite and 0 or more")
        hashes = np.array([xxhash.xxh3_64_intdigest(_bytes(key)) for key in keys], np.uint64)
        with self._lock:
            self._pending.append((hashes, weights))

    def of(self, hashes: Hashes) -> Floats:
        """The weights of the keys with `hashes`; one without has the mean of the others, or 1 for 0."""
        with self._lock:
            known, weights = self._known
        if not len(known):
            return np.ones(len(hashes))
        positions = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        found = known[positions] == hashes
        values = weights[positions].astype(np.float64)
        mean = float(values[found].mean()) if found.any() else 0.0
        return np.where(found, values, mean or 1.0)

    def of_snapshot(self, snapshot: Snapshot) -> Floats:
        """The weight of each sample of `snapshot`, float64 `[num_samples]`. Used by one thread."""
        return self.of(self._hashes.of(snapshot))

    def of_shards(self) -> dict[int, float]:
        """The mean weight of each shard of the last snapshot that was drawn from. Used by the same thread."""
        if not (of_shards := self._hashes.of_shards):
            return {}
        hashes = list(of_shards.values())
        ends = np.cumsum([len(part) for part in hashes])[:-1]
        parts = np.split(self.of(np.concatenate(hashes)), ends)
        shards = zip(of_shards, parts, strict=True)
        return {shard_id: float(part.mean()) for shard_id, part in shards if len(part)}

    # --- between ranks, and checkpoints

    def exchange(self, ranks: Ranks, name: str) -> None:
        """Apply the pending updates of all ranks, of later ranks last, in round `name`."""
        with self._lock:
            waiting = list(self._pending)
            self._sent = len(waiting)
        answers = ranks.agree(name, {"updates": _pack(*_latest(waiting))})
        with self._lock:
            self._known = _latest([self._known, *(_unpack(answer["updates"]) for answer in answers)])

    def confirm(self) -> None:
        """Drop the updates that were exchanged. Called once all ranks agreed on the segment: a cancelled
        preparation sends them again.
        """
        with self._lock:
            del self._pending[: self._sent]
            self._sent = 0

    def to_state(self) -> Packed:
        """All weights, with the pending updates applied."""
        with self._lock:
            return _pack(*_latest([self._known, *self._pending]))

    def load(self, state: Packed) -> None:
        """Restore a state from `to_state`; raises ConfigError for another value."""
        try:
            known = _unpack(state)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"these are no weights of an EpochLoader ({error!r})") from error
        with self._lock:
            self._pending.clear()
            self._sent = 0
            self._known = known


def draw(weights: Floats, count: int, key: int) -> IntArray:
    """`count` samples in a random order, each about `count * w / sum(w)` times: int64 `[count]`."""
    if not count:
        return np.empty(0, np.int64)
    total = float(weights.sum())
    ends = np.cumsum(weights if total else np.ones(len(weights)))
    offset = mix_key(key, _OFFSET_KEY) / 2.0**64
    points = (np.arange(count) + offset) * (ends[-1] / count)
    # Rounding may put the last point on the end. No sample of weight 0 is the first to end after a point.
    last = int(np.searchsorted(ends, ends[-1]))
    chosen = np.minimum(np.searchsorted(ends, points, side="right"), last)
    order = Permutation(count, mix_key(key, _SHUFFLE_KEY)).at(np.arange(count, dtype=np.int64))
    drawn: IntArray = chosen[order].astype(np.int64)
    return drawn


def _bytes(key: str) -> bytes:
    if not isinstance(key, str):
        raise ConfigError(
            f"the keys of weights are str, not {key!r}: take them from a batch, as batch['__key__']"
        )
    return key.encode("utf-8", "surrogatepass")


def _latest(parts: Sequence[Weighted]) -> Weighted:
    """Merge `parts`: sorted by hash, with the last weight given for each."""
    hashes = np.concatenate([np.empty(0, np.uint64), *(part[0] for part in parts)])
    weights = np.concatenate([np.empty(0, np.float32), *(part[1] for part in parts)])
    order = np.argsort(hashes, kind="stable")
    hashes, weights = hashes[order], weights[order]
    last = np.append(hashes[1:] != hashes[:-1], True) if len(hashes) else np.empty(0, np.bool_)
    return hashes[last], weights[last]


def _pack(hashes: Hashes, weights: npt.NDArray[np.float32]) -> Packed:
    return {"keys": pack_numbers(hashes, "<u8"), "weights": pack_numbers(weights, "<f4")}


def _unpack(packed: Packed) -> Weighted:
    hashes, weights = unpack_numbers(packed["keys"], "<u8"), unpack_numbers(packed["weights"], "<f4")
    if len(hashes) != len(weights):
        raise ValueError(f"{len(hashes)} keys for {len(weights)} weights")
    return hashes, weights
