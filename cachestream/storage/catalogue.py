"""The catalogue: one SQLite file, one row a shard, and the only SQL there is.

`journal_mode=TRUNCATE, synchronous=FULL`: rows are per shard, so WAL's speed is not needed, and the
SQLite that many Pythons bundle has a WAL-reset corruption. Writers use BEGIN IMMEDIATE, so what a
transaction read still holds when it commits.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from cachestream.errors import CacheError, CacheLockedError, CacheVersionError
from cachestream.storage.tables import Tables

__all__ = ["Catalogue", "CatalogueDamagedError"]

APPLICATION_ID: Final = 0x43535452  # "CSTR"
SCHEMA_VERSION: Final = 1
LOCK_TIMEOUT_S: Final = 20.0

_TABLES: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE schemas (id INTEGER PRIMARY KEY, json TEXT NOT NULL UNIQUE);
CREATE TABLE passes (
    id INTEGER PRIMARY KEY, plan TEXT NOT NULL UNIQUE, length INTEGER, next_position INTEGER NOT NULL,
    evicted_before INTEGER NOT NULL);
CREATE TABLE claims (
    id INTEGER PRIMARY KEY, pass_id INTEGER NOT NULL, position INTEGER NOT NULL, offset INTEGER NOT NULL,
    stop INTEGER NOT NULL, owner TEXT NOT NULL);
CREATE TABLE shards (
    id INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL, num_samples INTEGER NOT NULL, uses INTEGER NOT NULL,
    last_used INTEGER NOT NULL, schema_id INTEGER NOT NULL, pass_id INTEGER NOT NULL, spans BLOB NOT NULL);
CREATE TABLE reservations (
    id INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL, owner TEXT NOT NULL, doomed INTEGER NOT NULL);
CREATE TABLE suspects (
    pass_id INTEGER NOT NULL, position INTEGER NOT NULL, deaths INTEGER NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (pass_id, position)) WITHOUT ROWID;
CREATE TABLE failures (
    kind TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, example TEXT NOT NULL,
    PRIMARY KEY (kind, reason)) WITHOUT ROWID;
"""


class CatalogueDamagedError(CacheError):
    """The catalogue file is not a catalogue: rebuild it from the shards."""


class Catalogue:
    """Transactions on the catalogue at `path`, from any thread and after a fork.

    A connection belongs to the process that opened it: a forked child opens its own and leaves the
    parent's alone, because closing it would drop the parent's POSIX locks.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._abandoned: list[sqlite3.Connection] = []
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        if self._connection is not None:
            self._abandoned.append(self._connection)
            self._connection = None

    def create(self, meta: dict[str, Any]) -> None:
        """Create the tables and `meta`, unless another process just did."""
        with self.transaction() as tables:
            if tables.execute("PRAGMA user_version").fetchone()[0]:
                return
            for statement in _TABLES.split(";"):
                tables.execute(statement)
            for key, value in meta.items():
                tables.set_meta(key, value)
            tables.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            tables.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def check(self) -> None:
        """Raise CatalogueDamagedError or CacheVersionError unless this is a catalogue we can use."""
        with self._translated():
            connection = self._open()
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if application not in (0, APPLICATION_ID):
                raise CatalogueDamagedError(f"{self.path} is another program's SQLite file")
            if version > SCHEMA_VERSION:
                raise CacheVersionError(
                    f"{self.path} was written by a newer cachestream (catalogue version {version}, "
                    f"this one reads up to {SCHEMA_VERSION}); upgrade cachestream or use another directory"
                )
            if version == SCHEMA_VERSION:
                connection.execute("SELECT count(*) FROM meta").fetchone()

    @property
    def is_created(self) -> bool:
        """Whether the tables are there."""
        with self._translated():
            return bool(self._open().execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def transaction(self) -> Iterator[Tables]:
        """A write transaction: commits at the end, rolls back on an exception.

        Raises CacheLockedError when other processes hold the lock past the deadline.
        """
        with self._lock, self._translated():
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield Tables(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[Tables]:
        """A consistent view of all tables."""
        with self._lock, self._translated():
            connection = self._open()
            if connection.in_transaction:
                yield Tables(connection)
                return
            connection.execute("BEGIN")
            try:
                yield Tables(connection)
            finally:
                connection.execute("ROLLBACK")

    def data_version(self) -> int:
        """A number that changes when another connection commits: cheap to ask, no lock taken."""
        with self._lock, self._translated():
            return int(self._open().execute("PRAGMA data_version").fetchone()[0])

    def integrity_problem(self) -> str | None:
        """What SQLite's own check finds wrong with the file, if anything."""
        try:
            with self.reading() as tables:
                result = str(tables.execute("PRAGMA integrity_check(1)").fetchone()[0])
        except CatalogueDamagedError as error:
            return str(error)
        return None if result == "ok" else result

    def close(self) -> None:
        """Close this process's connection; the next use opens another."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(
            self.path, timeout=LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = TRUNCATE")
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)
            text = str(error)
            if "locked" in text or "busy" in text:
                raise CacheLockedError(
                    f"{self.path} was locked by another process for {LOCK_TIMEOUT_S:.0f} s; "
                    "look for a stopped or swapping process that uses this cache, then try again"
                ) from error
            if "not a database" in text or "malformed" in text or "encrypted" in text:
                raise CatalogueDamagedError(f"{self.path} is damaged ({text})") from error
            if "full" in text:
                raise CacheError(f"{self.path}: the disk is full; free some space") from error
            raise CacheError(f"{self.path}: {text} (SQLite {code})") from error
