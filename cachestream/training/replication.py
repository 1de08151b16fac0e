"""Groups of ranks that get equal batches, as ranks of tensor, context and pipeline parallelism need them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cachestream.errors import ConfigError
from cachestream.schema import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Replication:
    """`each` consecutive ranks get equal batches; or those that a device mesh puts at equal places but for
    some of its dimensions: `numbers` `[size of the job]` tells the group of each rank, `names` the
    dimensions.
    """

    each: int = 1
    numbers: IntArray | None = None
    names: tuple[str, ...] = ()

    def number_of(self, rank: int, size: int) -> int:
        """The number of the group of `rank` in a job of `size`; raises ConfigError for another job's
        groups.
        """
        if self.numbers is None:
            if size % self.each:
                raise ConfigError(
                    f"replicate={self.each}: the {size} ranks of the job make no groups of {self.each}; call "
                    "init_process_group() first, with a multiple of it"
                )
            return rank // self.each
        if len(self.numbers) != size:
            raise ConfigError(
                f"mesh= has {len(self.numbers)} ranks, and the job {size}: give the mesh of all ranks, not a "
                "part of it"
            )
        return int(self.numbers[rank])

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks; empty where every rank gets batches of its own."""
        if self.numbers is None:
            return {"replicate": self.each} if self.each > 1 else {}
        return {"replicate": list(self.names), "mesh": self.numbers.tolist()}


def make_replication(mesh: Any, replicate: int | str | Iterable[str] | None) -> Replication:
    """The groups for `mesh=` and `replicate=`. Raises ConfigError for what does not fit together."""
    if mesh is None:
        if replicate is None:
            return Replication()
        if isinstance(replicate, bool) or not isinstance(replicate, int) or replicate < 1:
            raise ConfigError(
                f"replicate={replicate!r}: give the number of consecutive ranks that get equal batches, or "
                "the names of dimensions beside mesh="
            )
        return Replication(replicate)
    names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
    if not hasattr(mesh, "mesh") or not names:
        raise ConfigError(f"mesh={mesh!r}: give a torch DeviceMesh with mesh_dim_names")
    if replicate is None or isinstance(replicate, int):
        raise ConfigError(
            f"mesh= and replicate={replicate!r}: give the dimensions whose ranks get equal batches, of "
            f"{', '.join(names)}"
        )
    wanted = (replicate,) if isinstance(replicate, str) else tuple(replicate)
    for name in wanted:
        if name not in names:
            raise ConfigError(f"replicate={name!r}: the mesh has the dimensions {', '.join(names)}")
    ranks = np.asarray(mesh.mesh.cpu().numpy(), np.int64)
    kept = [1 if name in wanted else length for name, length in zip(names, ranks.shape, strict=True)]
    groups = np.broadcast_to(np.arange(math.prod(kept)).reshape(kept), ranks.shape)
    if sorted(ranks.ravel().tolist()) != list(range(ranks.size)):
        raise ConfigError(
            f"mesh= has the ranks {ranks.ravel().tolist()[:16]}: give the mesh of all ranks of the job, not "
            "a part of it"
        )
    return Replication(numbers=groups.ravel()[np.argsort(ranks.ravel())], names=wanted)
