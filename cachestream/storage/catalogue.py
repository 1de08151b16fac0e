"""The catalogue: one SQLite file with a row for each shard. Only this module connects to it.

`journal_mode=PERSIST, synchronous=OFF`: the kernel keeps what a dead process has written, and after a power
cut the catalogue is made anew (recovery.py). Rows are per shard, so the speed of WAL is not needed, and the
SQLite that many Pythons bundle has a WAL-reset corruption. The journal keeps its space: on a disk that others
have filled, a small transaction still fits, by which shards are evicted. Writers use BEGIN IMMEDIATE, so a
value read in a transaction is still valid when it commits.
"""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final, NamedTuple

import xxhash

from cachestream.errors import CacheError, CacheVersionError
from cachestream.linux import kind_of, open_private, other_owner
from cachestream.storage.layout import Directory
from cachestream.storage.locks import file_identity, signal_safe
from cachestream.storage.os_errors import (
    CatalogueDamagedError,
    DiskFailedError,
    check_own,
    disk_error,
    translated_disk_errors,
    translated_sql_errors,
    unwritable,
)
from cachestream.storage.tables import SHARD_STATEMENTS, Tables

LOCK_TIMEOUT_S: Final = 20.0
_FORK_TIMEOUT_S: Final = LOCK_TIMEOUT_S + 5.0
_CACHE_KIB: Final = 65_536  # a transaction larger than the page cache locks out readers before it commits
_REOPENINGS: Final = 5
_MISSING_S: Final = 10.0  # the time to rebuild it from 10,000 shards
_POLL_S: Final = 0.02
_ROWS_AT_ONCE: Final = 1000
JOURNAL_BYTES: Final = 65_536  # the eviction of one shard changes about ten pages

APPLICATION_ID: Final = 0x43535452  # "CSTR"
SCHEMA_VERSION: Final = 3
_STATEMENTS: Final = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    """CREATE TABLE passes (
        id INTEGER PRIMARY KEY, plan TEXT NOT NULL UNIQUE, length INTEGER, next_position INTEGER NOT NULL,
        evicted_before INTEGER NOT NULL, progress TEXT NOT NULL)""",
    *SHARD_STATEMENTS,
    """CREATE TABLE failures (
        kind TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, example TEXT NOT NULL,
        PRIMARY KEY (kind, reason)) WITHOUT ROWID""",
)


class Revision(NamedTuple):
    """A state of the catalogue. Two equal revisions mean that nothing was committed in between.

    `openings` counts those of this process; `others` is SQLite's count of commits by other connections, and
    `own` that of commits by this one.
    """

    openings: int
    others: int
    own: int

    def after_one(self) -> Revision:
        """The state after one more transaction of this process, and none of another."""
        return self._replace(own=self.own + 1)


class Catalogue:
    """Transactions on the catalogue at `path`, from any thread and after a fork.

    A file that another process has put in its place is opened instead of the old one. One that is missing,
    damaged or cannot be read raises CatalogueDamagedError or DiskFailedError, while `is_mended()` after
    `patience_s`: whoever opens the cache, or supervises it, rebuilds it.

    A connection belongs to the process that opened it. No transaction is open while the process forks: SQLite
    keeps account of its POSIX locks in memory, so a child would believe that it holds its parent's locks. The
    child opens its own connection and never closes the parent's. No other code may open and close the file:
    that would drop the POSIX locks that the connections of this process hold on it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._directory = Directory(os.path.dirname(path))
        self.patience_s = _MISSING_S  # 0 in the process that rebuilds it
        self.is_mended: Callable[[], bool] = lambda: False  # whether a worker runs
        self.identity: tuple[int, int] | None = None  # of the file that was opened last
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._read_only = False
        self._troubled_s: float | None = None  # since when it has been missing, damaged or unreadable
        self._local = threading.local()
        self._openings = self._commits = 0
        with _fork_lock:
            _catalogues.add(self)

    def create(self, fill: Callable[[Tables], None]) -> None:
        """Create the file and its tables, and `fill` them, in one transaction.

        Raises CacheError for a file that exists.
        """
        with translated_disk_errors(self.path):
            os.close(open_private(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        with self.transaction() as tables:
            for statement in _STATEMENTS:
                tables.execute(statement)
            tables.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            tables.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            fill(tables)

    def problem(self) -> str | None:
        """The first problem of the file that SQLite finds; None if it is sound.

        Raises CacheVersionError for a catalogue of a newer version, DiskFailedError for one that the disk
        does not read.
        """
        if file_identity(self.path) is None:
            return f"{self.path} is missing"
        self.close()  # otherwise SQLite would check the pages that it has in memory
        try:
            with self._within("BEGIN", patient=False) as tables:
                (application,) = tables.execute("PRAGMA application_id").fetchone()
                if application != APPLICATION_ID:
                    return f"{self.path} is not a catalogue"
                (version,) = tables.execute("PRAGMA user_version").fetchone()
                if version < SCHEMA_VERSION:
                    return f"{self.path} is of an earlier version"
                (said,) = tables.execute("PRAGMA integrity_check(1)").fetchone()
                tables.totals(), tables.meta("catalogue_id")  # raises for a file without our tables
                return None if said == "ok" else str(said)
        except CatalogueDamagedError as error:
            return str(error)

    @property
    def has_committed(self) -> bool:
        """True if this process has changed the catalogue."""
        return self._commits > 0

    def digest(self) -> str:
        """A hash of all rows: pages that a power cut left of different times do not have that of a whole
        file.
        """
        found = xxhash.xxh3_64()
        with self.reading() as tables:
            names = tables.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            for (name,) in names.fetchall():
                rows = tables.execute(f"SELECT * FROM {name}")  # noqa: S608  a name of our own tables
                while part := rows.fetchmany(_ROWS_AT_ONCE):
                    found.update(repr((name, part)).encode("utf-8", "surrogatepass"))
        return found.hexdigest()

    def transaction(self) -> AbstractContextManager[Tables]:
        """A write transaction: commits at the end, rolls back on an exception.

        Raises CacheLockedError when another process holds the lock past the deadline, CacheFullError when the
        disk is full, and CacheError when the file cannot be written.
        """
        return self._within("BEGIN IMMEDIATE")

    def reading(self) -> AbstractContextManager[Tables]:
        """A consistent view of all tables."""
        return self._within("BEGIN")

    @signal_safe
    def _within(self, begin: str, *, patient: bool = True) -> Iterator[Tables]:
        is_reading = begin == "BEGIN"
        timeout_s = self._lock_timeout_s
        with self._lock, translated_sql_errors(self.path, timeout_s):
            if is_reading and self._connection is not None and self._connection.in_transaction:
                yield Tables(self._connection, self._directory)
                return
            for _ in range(_REOPENINGS):
                connection = self._readable(patient=patient, timeout_s=timeout_s)
                if not is_reading:
                    check_own(self._directory.root)
                    if self._read_only:
                        raise unwritable(self.path)
                try:
                    with connection:  # commits or rolls back in C, where no signal interrupts it
                        connection.execute(begin)
                        # While this process waited for the lock, another may have replaced the file by a
                        # rebuilt one.
                        if file_identity(self.path) == self.identity:
                            if not is_reading:
                                self._allocate_journal()
                            tables = Tables(connection, self._directory)
                            try:
                                yield tables
                            finally:
                                tables.close()
                            if is_reading:
                                connection.rollback()
                            self._commits += not is_reading  # before it: an interrupt would hide the commit
                            return
                finally:
                    if connection.in_transaction:
                        self.close()  # it could not roll back; the next connection does, from the journal
        raise CacheError(f"{self.path} is replaced again and again; is another program at work there?")

    def revision(self) -> Revision:
        """The current revision; every commit, by any process, changes it. Not within a transaction."""
        with self._lock, translated_sql_errors(self.path, LOCK_TIMEOUT_S):
            # data_version counts the commits of other connections.
            others = int(self._connected().execute("PRAGMA data_version").fetchone()[0])
            return Revision(self._openings, others, self._commits)

    def close(self) -> None:
        """Close this process's connection; the next use opens another."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def __del__(self) -> None:
        if getattr(self, "_connection", None) is not None:
            self.close()

    @contextmanager
    def hurried(self, is_hurried: bool = True) -> Iterator[None]:
        """Have this thread not wait for a file that is missing, damaged or unreadable: it can do without."""
        self._local.is_hurried = is_hurried
        try:
            yield
        finally:
            self._local.is_hurried = False

    @contextmanager
    def patient_until(self, deadline_s: float) -> Iterator[None]:
        """Have this thread wait for locks of other processes until this monotonic time, 20 s at most."""
        self._local.deadline_s = deadline_s
        try:
            yield
        finally:
            self._local.deadline_s = math.inf

    @property
    def _lock_timeout_s(self) -> float:
        left_s = getattr(self._local, "deadline_s", math.inf) - time.monotonic()
        return min(LOCK_TIMEOUT_S, max(_POLL_S, left_s))

    def may_be_mended(self) -> bool:
        """Return whether this thread should wait for a worker to mend the file."""
        return not getattr(self._local, "is_hurried", False) and self.is_mended()

    def _readable(self, *, patient: bool, timeout_s: float) -> sqlite3.Connection:
        """The connection, once the file can be read.

        A worker that runs rebuilds a damaged file, and waits for a disk that fails.
        """
        while True:
            try:
                with translated_sql_errors(self.path, timeout_s):
                    connection = self._connected()
                    connection.execute(f"PRAGMA busy_timeout = {int(1000 * timeout_s)}")
                    connection.execute("PRAGMA schema_version").fetchone()
                self._troubled_s = None
                return connection
            except (CatalogueDamagedError, DiskFailedError):
                self.close()  # SQLite may keep what it has read
                # The end of the patience with the present trouble, which all uses of the catalogue share.
                self._troubled_s = self._troubled_s or time.monotonic()
                is_over = time.monotonic() >= self._troubled_s + self.patience_s
                if not patient or is_over or not self.may_be_mended():
                    raise
            time.sleep(_POLL_S)  # bounded by the deadline

    def _allocate_journal(self) -> None:
        """Extend a journal below `JOURNAL_BYTES` by zeros, which SQLite overwrites. Requires the write lock.

        It is not created here, but by SQLite, with the owner of the catalogue.
        """
        with suppress(OSError):  # needed only on a full disk
            size_bytes = os.lstat(self.path + "-journal").st_size
            if size_bytes < JOURNAL_BYTES:
                fd = open_private(self.path + "-journal", os.O_WRONLY)
                try:
                    os.pwrite(fd, bytes(JOURNAL_BYTES - size_bytes), size_bytes)
                finally:
                    os.close(fd)

    def _connected(self) -> sqlite3.Connection:
        _check_kind(self.path)
        if self._connection is not None and file_identity(self.path) != self.identity:
            self.close()
        if self._connection is None:
            self._connection = self._open()
            self._openings += 1
        return self._connection

    def _open(self) -> sqlite3.Connection:
        self.identity = file_identity(self.path)  # another file may have the inode of one that is gone
        if self.identity is None:
            if not os.path.isdir(os.path.dirname(self.path)):
                raise disk_error(self.path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
            raise CatalogueDamagedError(f"{self.path} is missing; run 'cachestream verify CACHE --repair'")
        # Not tested by opening the file: the close would drop the locks of this process's other connections.
        is_writable = os.access(self.path, os.W_OK, effective_ids=True)
        self._read_only = not is_writable or other_owner(self._directory.root) is not None
        mode = "ro" if self._read_only else "rw"
        uri = f"file:{urllib.parse.quote(os.fsencode(self.path))}?mode={mode}"
        connection = sqlite3.connect(
            uri, uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = PERSIST")
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA temp_store = MEMORY")  # no temporary files outside the cache
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            self._check_version(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_version(self, connection: sqlite3.Connection) -> None:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if application == APPLICATION_ID and version > SCHEMA_VERSION:
            raise CacheVersionError(
                f"{self.path} was written by a newer cachestream (catalogue version {version}, "
                f"this one reads up to {SCHEMA_VERSION}); upgrade cachestream or use another directory"
            )

    def _forget_parent(self) -> None:
        """Drop the parent's lock and connection, in a forked child."""
        self._lock = threading.RLock()
        if self._connection is not None:
            _inherited.append(self._connection)
            self._connection = None


def _check_kind(path: str) -> None:
    """Raise CacheError for what is no regular file: SQLite follows links, and waits for a named pipe."""
    for name in (path, path + "-journal"):
        if kind_of(name) is not None:
            raise disk_error(name, OSError(errno.ENXIO, os.strerror(errno.ENXIO)))


_fork_lock = threading.RLock()
_catalogues: weakref.WeakSet[Catalogue] = weakref.WeakSet()
_locked_for_fork: list[Catalogue] = []
_inherited: list[sqlite3.Connection] = []  # of the parent; kept, because a close would drop its locks


def _before_fork() -> None:
    """Wait until no thread is in a transaction. Hooks registered earlier (locks.py) run after this."""
    _fork_lock.acquire(timeout=_FORK_TIMEOUT_S)
    _locked_for_fork[:] = [one for one in list(_catalogues) if one._lock.acquire(timeout=_FORK_TIMEOUT_S)]


def _after_fork_in_parent() -> None:
    for one in _locked_for_fork:
        one._lock.release()
    _locked_for_fork.clear()
    try:
        _fork_lock.release()
    except RuntimeError:  # not acquired: the timeout had passed
        pass


def _after_fork_in_child() -> None:
    global _fork_lock
    _fork_lock = threading.RLock()
    _locked_for_fork.clear()
    for one in list(_catalogues):
        one._forget_parent()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
