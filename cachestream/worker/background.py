"""The worker's background process: it takes its job, becomes the supervisor of the cache, answers, and supervises."""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
import traceback
from contextlib import suppress
from io import TextIOWrapper
from typing import Final

from cachestream.errors import CacheLockedError, CacheStreamError, WorkerError
from cachestream.linux import move, open_private
from cachestream.storage.cache import Cache
from cachestream.storage.layout import remove_if_there
from cachestream.storage.locks import HeldFile, lock_file
from cachestream.storage.os_errors import CatalogueDamagedError, translated_disk_errors
from cachestream.worker.fork_server import ForkServer
from cachestream.worker.job import Job, read_frame, unpack, write_frame
from cachestream.worker.passes import begin
from cachestream.worker.processes import begin_clean, let_go_of_terminal, name_process
from cachestream.worker.supervisor import Supervisor

_LOG_BYTES: Final = 64 * 1024
_LOCK_TIMEOUT_S: Final = 1.0

logger = logging.getLogger("cachestream.worker")


def main() -> None:
    """The supervisor's main: the job comes through stdin, one answer goes to stdout."""
    name_process("cs-supervisor")
    begin_clean()
    server = ForkServer(sys.argv[1:])  # first of all: it must not have what is opened and locked below
    try:
        supervisor = _begin(server)
        code = 0 if supervisor is None else supervisor.run()
    finally:
        server.close()
    logging.shutdown()
    os._exit(code)  # the lock goes with the process: who sees it free knows that nothing of it is left


def _begin(server: ForkServer) -> Supervisor | None:
    """Take the job, start its processes and answer; None if nothing came of it."""
    try:
        job: Job = read_frame(sys.stdin.buffer)
    except EOFError:
        return None  # started ahead of a source that could not be opened, or by a process that has died
    answer = sys.stdout.buffer
    try:
        cache = Cache(job.root, eviction=unpack(job.payload).eviction if job.custom_eviction else None)
        lock = _become_the_supervisor(cache)
        _open_log(cache)
        removed = cache.recover()
        _forget_debts(cache)
        supervisor = Supervisor(job, cache, lock, server)
        try:
            has_more = begin(cache, job, supervisor.draw)
        except CatalogueDamagedError:  # which has it rebuilt by the next use
            has_more = begin(cache, job, supervisor.draw)
        supervisor.start(is_complete=not has_more)
        write_frame(answer, "ready")
    except CacheStreamError as error:
        write_frame(answer, error)
        return None
    except Exception as error:  # a process's main: the caller gets the traceback
        write_frame(answer, WorkerError(f"the worker cannot start: {error}", traceback.format_exc()))
        raise
    logger.info("started, %d left-over files removed", removed)
    let_go_of_terminal()
    return supervisor


def _become_the_supervisor(cache: Cache) -> HeldFile:
    lock = lock_file(cache.directory.worker_file("supervisor.lock"), timeout_s=_LOCK_TIMEOUT_S)
    if lock is None:
        raise CacheLockedError(f"another supervisor runs for {cache.path}; attach to it by starting again")
    return lock


def _forget_debts(cache: Cache) -> None:
    """What was fetched under an earlier limit on the bandwidth is not paid for at this one's rate: it may have been mistyped."""
    budget = cache.directory.worker_file("budget")
    with translated_disk_errors(budget, "removing it"):
        remove_if_there(budget)


class _PrivateLog(logging.handlers.RotatingFileHandler):
    """A log that only its owner can read: it tells what transforms print."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding=self.encoding, opener=open_private)

    def doRollover(self) -> None:  # noqa: N802  logging's name
        if self.stream is not None:
            self.stream.close()
        with suppress(OSError):
            move(self.baseFilename, self.baseFilename + ".1")
        self.stream = self._open()


def _open_log(cache: Cache) -> None:
    handler = _PrivateLog(
        cache.directory.worker_file("log.txt"), maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8"
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
