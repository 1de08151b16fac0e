"""Jobs of several ranks in one process: threads stand in for processes, and agree through a real store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cachestream import Cache, EpochLoader
from cachestream.training import prepare
from cachestream.training.ranks import Deadlines, Ranks, StoreRanks
from cachestream.training.rendezvous import StoreConnection
from cachestream.training.threads import Flag

__all__ = ["PATIENCE_S", "Job"]

PATIENCE_S: Final = 180.0  # longer than any rank takes, also on a busy machine
_jobs = itertools.count()


class Job:
    """A job of `size` ranks, each a thread with a loader of its own.

    `deadline_s`: how long a rank waits for the others once all have met, `meeting_s` until then.
    """

    meeting_s: float = PATIENCE_S

    deadline_s: float = PATIENCE_S

    def __init__(self, server: Any, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = server
        self.size = size
        self._name = f"job{next(_jobs)}"
        self._local = threading.local()
        monkeypatch.setattr(prepare, "find_ranks", self._find)

    def _find(
        self,
        instance: int,
        settings: dict[str, Any],
        cache_id: str,
        deadlines_s: Deadlines,
        closed: Flag,
        *job: object,
    ) -> Ranks:
        rank = self.instances[instance]  # of the loader in whose background thread this is called
        client = TCPStore(
            "127.0.0.1", self._server.port, is_master=False, timeout=timedelta(seconds=PATIENCE_S)
        )
        deadlines = Deadlines(min(deadlines_s.first, self.meeting_s), self.deadline_s)
        line = StoreConnection(PrefixStore(self._name, client))
        ranks = StoreRanks(line, rank, self.size, deadlines, closed)
        ranks.meet(settings, cache_id)
        return ranks

    def run(self, work: Callable[[int, Callable[..., EpochLoader]], Any]) -> list[Any]:
        """The result of `work(rank, make_loader)`, or its exception, for each rank."""
        self.instances: dict[int, int] = {}

        def one(rank: int) -> Any:
            made: list[EpochLoader] = []

            def make(cache: Cache, *args: Any, **options: Any) -> EpochLoader:
                loader = EpochLoader(cache, *args, **{"timeout_s": PATIENCE_S, **options})
                self.instances[loader._background.preparer.instance] = rank
                made.append(loader)
                return loader

            try:
                return work(rank, make)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error
            finally:
                self.done.wait(PATIENCE_S)
                for loader in made:
                    loader.close()

        self.done = threading.Barrier(self.size)
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))
