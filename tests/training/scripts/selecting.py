"""One rank of a job that selects: `selecting.py OUT SHARED OWN OWN`; writes OUT/<rank>.json.

Samples and fields of the cache SHARED, and batches by tokens of a cache for each rank: one epoch of each, and one that
is interrupted, and goes on in a new loader from the state of the first rank.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

import cachestream as cs

DONE: Final = 3  # batches before the interruption
SELECTED: Final[dict[str, Any]] = {
    "where": lambda columns: columns["number"] % 3 == 0,
    "columns": ["number"],
    "drop_last": False,
}
TOKENS: Final[dict[str, Any]] = {
    "where": lambda columns: columns.lengths("t") <= 30,
    "columns": ["number"],
    "max_tokens": {"t": 120},
}


def interrupted(path: str, batch_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Two epochs: their lengths, as a loader and one that goes on tell, their fields, and the numbers in the batches."""
    with cs.Cache(path) as cache:
        with cs.EpochLoader(cache, batch_size, **options) as loader:
            length, first = len(loader), list(loader)
            batches = iter(loader)
            begun = list(islice(batches, DONE))
            states = [loader.state_dict()]
            dist.broadcast_object_list(states)
            rest = list(batches)
        with cs.EpochLoader(cache, batch_size, **options) as loader:
            loader.load_state_dict(states[0])
            lengths, again = [length, len(loader)], list(loader)
    numbers = {
        name: [batch["number"].tolist() for batch in found]
        for name, found in (("first", first), ("begun", begun), ("rest", rest), ("again", again))
    }
    return {"lengths": lengths, "fields": sorted({name for batch in first for name in batch}), **numbers}


def main() -> None:
    out, shared, *own = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = {"selected": interrupted(shared, 3, SELECTED), "tokens": interrupted(own[rank], 16, TOKENS)}
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
