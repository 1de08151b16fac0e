"""A supervisor in this process, with a clock that goes on by itself, and with scripts for processes.

Nothing is started, and nobody waits: where the supervisor would wait for its processes, the clock goes on.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

from cachestream import Cache
from cachestream.errors import SampleError
from cachestream.shard_format import encode_header
from cachestream.storage.locks import HeldFile, lock_file
from cachestream.storage.publish import write_shard
from cachestream.storage.telemetry import ENDED, FETCHING, Board
from cachestream.worker.attachments import Attachments, _own, release
from cachestream.worker.channel import Channel, Message, _framed
from cachestream.worker.child_process import ChildProcess, Forks
from cachestream.worker.launch import WorkerOptions
from cachestream.worker.order import END
from cachestream.worker.passes import begin_or_resume, has_failed_units
from cachestream.worker.processes import EndedSessions
from cachestream.worker.sampling.encode import to_record
from cachestream.worker.sampling.packer import Packer
from cachestream.worker.sampling.publisher import PendingProgress
from cachestream.worker.sampling.unit import Unit
from cachestream.worker.supervisor import Supervisor
from cachestream.worker.user_process import UserCode
from tests.worker.sources import Numbers, content

HANG_S: Final = 30.0
UNIT_S: Final = 0.05  # that a process takes for a unit
_PIDS: Final = itertools.count(1 << 23)  # above those of any process

# The things that a process does at a unit instead of reading it.
HANG, FAIL, KILLED = "hang", "fail", "killed"
CRASHES: Final = {"segfault": -signal.SIGSEGV, KILLED: -signal.SIGKILL, "exit 3": 3}


class Process(ChildProcess):
    """A process that is not there: `does` is called again and again while it runs."""

    def start(self, now_s: float) -> None:
        self.start_at_s, self.life_s = now_s, None
        forks = cast("LoopForks", self._forks)
        if forks.loop.has_no_descriptors:
            raise OSError(24, "Too many open files")
        ours, theirs = socket.socketpair()
        self.pid, self.channel, self.theirs = next(_PIDS), Channel(ours), Channel(theirs)
        self.started_s, self.start_at_s, self.code = now_s, None, cast("int | None", None)
        forks.selector.register(self.channel, selectors.EVENT_READ, self)
        self.does: Callable[[], None] = forks.script(self)

    def ends(self, code: int) -> None:
        """End with this exit code."""
        if self.code is None:
            self.code = code
            self.theirs.close()

    def reap(self) -> int | None:
        if self.pid is None or self.code is None:
            return None
        self.close_ends()
        self.pid = None
        return self.code

    def kill(self) -> None:
        if self.pid is not None:
            self.ends(-signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.reap()


class LoopForks(Forks):
    """What the processes of the supervisor have in common, in this process."""

    def __init__(self, loop: Loop) -> None:
        self.selector, self.ended, self.children = LoopSelector(loop), EndedSessions(), []
        self.clock = lambda: loop.now_s
        self.script, self.loop = loop.script, loop

    def process(self, name: str, run: Callable[[socket.socket], int]) -> ChildProcess:
        return Process(name, self, run)

    def end_orphans(self) -> None:
        """Leave the children of this process alone."""


class LoopSelector(selectors.DefaultSelector):
    """Waits by letting the clock go on, and the processes act."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.act()
        found = super().select(0)
        if not found:
            self._loop.now_s += min(timeout or 0.0, UNIT_S)
        return found


class LoopAttachments(Attachments):
    """The attachments of a supervisor: the locks that it keeps to its end are known."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop.cache.directory, lambda: loop.now_s)
        self.kept: list[HeldFile] = []

    def attach_lock(self, timeout_s: float = 0.0) -> HeldFile:
        self.kept.append(super().attach_lock(timeout_s))
        return self.kept[-1]


class Sampling:
    """A sampling process that publishes each unit by itself, or does with it what the loop says."""

    def __init__(self, loop: Loop, process: Process, index: int) -> None:
        self._loop, self._process, self._channel = loop, process, process.theirs
        self._slot = loop.board.slot(index)
        self._slot["pid"], self._slot["state"] = process.pid, FETCHING
        self._units: deque[Unit] = deque()
        self._is_asking = self._hangs = False
        self._answer: Any = None
        self._then: Callable[[Any], None] | None = None  # what follows the answer that is waited for
        self._free_at_s = 0.0
        self._row: Any = None

    def __call__(self) -> None:
        for kind, _, arguments in self._channel.receive() or ():
            self._hear(kind, arguments)
        if self._process.code is not None or self._loop.is_suspended:
            return
        self._slot["beat_s"] = self._loop.now_s
        if self._hangs or self._then is not None or self._loop.now_s < self._free_at_s:
            return
        if self._units:
            self._read(self._units.popleft())
        elif not self._is_asking:
            self._is_asking = True
            self._channel.tell("want", 4)

    def _hear(self, kind: str, arguments: tuple[Any, ...]) -> None:
        if kind == "units":
            self._row, units, _ = arguments
            self._units.extend(units)
            self._is_asking = False
        elif kind in ("end", "stop"):
            self._slot["state"] = ENDED
            self._process.ends(0)
        elif kind == "answer" and self._then is not None:
            then, self._then = self._then, None
            then(arguments[0])

    def _ask(self, kind: str, *arguments: Any, then: Callable[[Any], None]) -> None:
        self._then = then
        message: Message = kind, 1, arguments
        self._channel._waiting += _framed(message)
        self._channel.flush()

    def _read(self, unit: Unit) -> None:
        self._loop.reads.append(unit.number)
        self._free_at_s = self._loop.now_s + UNIT_S
        self._slot["reads"][0], self._slot["read_beats_s"][0] = unit.position + 1, self._loop.now_s
        does = self._loop.does.get(unit.number)
        if does == HANG:
            self._hangs = True
        elif does in CRASHES:
            self._process.ends(CRASHES[does])
        else:
            self._slot["reads"][0] = 0
            self._publish(unit, has_failed=does == FAIL)

    def _publish(self, unit: Unit, *, has_failed: bool) -> None:
        progress, key = PendingProgress(), f"{unit.number}/0"
        if has_failed:
            progress.count_skipped("sample", SampleError("torn"), f"unit {unit.number}")
            progress.finish_unit(unit.position, [])
            self._ask("publish", progress.publication(self._row, []), then=self._has_published)
            return
        packer = Packer()
        packer.add(to_record({"x": content(key, self._loop.source.nbytes)}, key), None)
        shard = packer.content({})
        header = encode_header(shard)
        progress.add_samples(unit.position, 0, 1)
        progress.finish_unit(unit.position, [(1, END)])

        def write(reserved: Any) -> None:
            if isinstance(reserved, Exception):
                raise reserved
            self._slot["state"] = FETCHING
            written = write_shard(self._loop.cache.directory, reserved[0], header, shard)
            self._ask("publish", progress.publication(self._row, [written]), then=self._has_published)

        self._ask("reserve", (len(header) + shard.data_bytes,), then=write)

    def _has_published(self, answer: Any) -> None:
        if isinstance(answer, Exception):
            raise answer
        self._slot["committed"] += 1


class Loop:
    """A supervisor that fills `cache` with the units of `Numbers`; `does`: what happens at some of them."""

    def __init__(
        self,
        cache: Cache,
        units: int = 20,
        does: Mapping[int, str] | None = None,
        *,
        nbytes: int = 1000,
        linger_s: float = 0.0,
        **options: Any,
    ) -> None:
        self.now_s = 1000.0
        self.does = dict(does or {})
        self.reads: list[int] = []
        self.is_suspended = self.has_no_descriptors = self.is_over = False
        self.source = Numbers(units, nbytes=nbytes)
        chosen: dict[str, Any] = {
            "num_workers": 1,
            "order": "sequential",
            "hang_timeout_s": HANG_S,
            **options,
        }
        self.job = WorkerOptions(**chosen).job(cache, self.source)
        self.cache = Cache(cache.path)
        self.cache.catalogue.patience_s = 0.0
        self.board = Board(cache.directory.worker_file("board"))
        self.attachment: HeldFile | None = None
        self.attach(linger_s)
        self.forks = LoopForks(self)
        lock = lock_file(cache.directory.worker_file("supervisor.lock"))
        assert lock is not None
        self._lock = lock
        order = UserCode(self.job, self.forks)
        self.cache.recover()
        has_more = begin_or_resume(self.cache, self.job, order)
        self.supervisor = Supervisor(self.job, self.cache, lock, self.forks, order)
        self._attachments = self.supervisor._attachments = LoopAttachments(self)
        self.supervisor.asks_failed_again = has_failed_units(self.cache)
        self.supervisor.start(is_complete=not has_more)

    def script(self, process: Process) -> Callable[[], None]:
        """Return what a process does that has started, again and again."""
        index = int(process.name.removeprefix("process "))
        return Sampling(self, process, index)

    def act(self) -> None:
        for process in self.forks.children:
            if process.running and cast("Process", process).code is None:
                cast("Process", process).does()

    @property
    def processes(self) -> list[Process]:
        """The processes that run."""
        return [cast("Process", one) for one in self.forks.children if one.running]

    @property
    def restarts(self) -> int:
        return self.board.restarts

    def run(self, until: Callable[[], object], within_s: float = 600.0) -> float:
        """Go on until this is so; returns the seconds by the clock, and fails after `within_s`."""
        begun_s = self.now_s
        while not until():
            assert not self.is_over, "the worker has ended"
            assert self.now_s - begun_s < within_s, f"not so within {within_s} s"
            self.is_over = self.supervisor.turn()
        return self.now_s - begun_s

    def rest(self, seconds: float) -> None:
        """Go on for so long."""
        ends_s = self.now_s + seconds
        self.run(lambda: self.now_s >= ends_s, seconds + 1.0)

    def complete(self) -> float:
        """Go on until the pass is complete."""
        return self.run(lambda: self.cache.fill_state() == "complete")

    def attach(self, linger_s: float = 0.0) -> None:
        """Have a process need the worker."""
        self.attachment = Attachments(self.cache.directory).attach(linger_s)

    def forsake(self, *, dies: bool) -> None:
        """Have the process that needs the worker release it, or die."""
        assert self.attachment is not None
        if dies:
            self.attachment.release()
            _own.discard(self.attachment)
        else:
            release(self.attachment)
        self.attachment = None

    def end(self) -> int:
        """Go on until the worker ends by itself; its exit code."""
        self.is_over = True
        return self.supervisor.run()

    def close(self) -> None:
        if self.attachment is not None:
            release(self.attachment)
        if not self.is_over or self.processes:
            self.supervisor.run()
        self.cache.close()
        self.forks.selector.close()
        for lock in self._attachments.kept:
            lock.release()
        self._lock.release()


@contextmanager
def filling(cache: Cache, *arguments: Any, **options: Any) -> Iterator[Loop]:
    """A loop that is ended."""
    logger = logging.getLogger("cachestream.worker")
    logger.disabled = True  # the tracebacks of its records would keep the board open
    loop = Loop(cache, *arguments, **options)
    try:
        yield loop
    finally:
        loop.close()
        logger.disabled = False
