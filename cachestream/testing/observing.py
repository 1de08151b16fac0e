"""Observations of the checks: threads, files, another process, the contents of a cache, and what a source gives.

What breaks the protocol raises an AssertionError that says how.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import cloudpickle
import numpy as np

from cachestream.errors import CacheStreamError, SampleError
from cachestream.sources.base import Source
from cachestream.storage.cache import Cache
from cachestream.storage.shard import MappedShard
from cachestream.worker.processes import import_path, start_python
from cachestream.worker.sampling.encode import Table, joined, to_record

# Beginnings of what connections that stay open for the next read are.
_POOLED: Final = ("socket:", "anon_inode:", "/dev/", "/proc/", "/memfd:")


def is_source(value: Source | Callable[[], Source]) -> TypeGuard[Source]:
    """Return whether `value` is a source itself; a class of sources is not, although it has the same
    attributes.
    """
    return isinstance(value, Source) and not isinstance(value, type)


class NumberedSource:
    """The first `num_units` of a source, with the unit and offset in their keys: "<unit> <offset> <key>"."""

    def __init__(self, inner: Source, num_units: int) -> None:
        self._inner = inner
        self.num_units = num_units
        self.fingerprint = inner.fingerprint

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, Any]]:
        for offset, (key, sample) in enumerate(self._inner.read(unit, rng)):
            yield f"{unit} {offset} {key}", sample

    @staticmethod
    def place(key: str) -> tuple[int, int]:
        """The unit of a sample, and its place in it, from its key."""
        unit, offset, _ = key.split(" ", 2)
        return int(unit), int(offset)


def cached_keys(cache: Cache) -> Iterator[str]:
    """The keys of all samples in published shards, in the order they were published."""
    folder = os.path.join(cache.path, "shards")
    for name in sorted(os.listdir(folder)):
        with closing(MappedShard(os.path.join(folder, name))) as shard:
            yield from shard.keys()


def threads() -> set[str]:
    """The threads of this process."""
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}


def open_files() -> set[str]:
    """Open files and pipes of this process, by number and path."""
    found = set()
    with suppress(OSError):  # only Linux tells
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if not target.startswith(_POOLED):
                    found.add(f"{fd} -> {target}")
    return found


def fingerprint_elsewhere(source: Source | Callable[[], Source], timeout_s: float) -> str:
    """The fingerprint as a fresh interpreter finds it."""
    with start_python(__name__, import_path(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            output = process.communicate(cloudpickle.dumps(source), timeout_s)[0]
        except subprocess.TimeoutExpired:
            output = b""
            process.kill()
    answer = False, f"the process ended with code {process.returncode}; its error is on stderr"
    if output:
        answer = json.loads(output.splitlines()[-1])  # before it, the source may have printed something
    is_fingerprint, text = answer
    if not is_fingerprint:
        raise AssertionError(f"the source could not be opened in another process: {text}")
    return text


def main() -> None:
    """Tell the fingerprint of the source that comes through stdin."""
    try:
        source = pickle.loads(sys.stdin.buffer.read())  # noqa: S301  sent by our own parent
        answer = True, (source if is_source(source) else source()).fingerprint
    except Exception as error:  # noqa: BLE001  a process's main: the parent tells
        answer = False, f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{json.dumps(answer)}\n")


Samples = list[tuple[str, Table]]


def expect(kept: bool, message: str) -> None:
    if not kept:
        raise AssertionError(message)


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def rng_of(unit: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=unit))


@dataclass(slots=True)
class CheckedSource:
    """A source under test, or a function that makes one, and the way to read it; see `check_source` for the
    fields.
    """

    source: Source | Callable[[], Source]
    secrets: tuple[str, ...] = ()
    transform: Callable[[Any], Any] | None = None
    max_units: int = 8
    timeout_s: float = 180.0
    _made: Source | None = field(default=None, init=False)

    def make(self) -> Source:
        """The source; a new one each time where a function was given."""
        given: Any = self.source
        made: Source = given if is_source(given) else given()
        expect(is_source(made), f"{type(made).__name__} has not all of fingerprint, num_units and read")
        return made

    @property
    def subject(self) -> Source:
        """The source that all checks share, but for those that make a new one."""
        if self._made is None:
            self._made = self.make()
        return self._made

    def units(self, source: Source) -> range:
        """The units that are read."""
        count = source.num_units
        return range(self.max_units if count is None else min(count, self.max_units))

    def read(self, source: Source, unit: int, *, untransformed: bool = False) -> Samples:
        """The samples of `unit` as they would be stored; those before a SampleError, if there is one.

        `untransformed`: as the source gives them.
        """
        samples: Samples = []
        try:
            item: Any
            for item in source.read(unit, rng_of(unit)):
                is_pair = isinstance(item, tuple) and len(item) == 2
                expect(is_pair, f"read({unit}) yielded {item!r}, not (key, sample)")
                record = to_record(item[1]) if untransformed else self.record(unit, item[1])
                samples.append((self.key(unit, item[0]), record))
        except SampleError as error:  # a unit, or the rest of it, that cannot be used: allowed, and counted
            self.expect_no_secret(f"the error of read({unit})", f"{error} {error!r}")
        except (CacheStreamError, AssertionError):
            raise
        except Exception as error:
            raise AssertionError(
                f"read({unit}) raised {type(error).__name__}: {error}; raise cachestream.SampleError for what "
                "cannot be used, SourceUnavailableError for a remote that does not answer"
            ) from error
        return samples

    def key(self, unit: int, key: Any) -> str:
        """The key of a sample of `unit`: a text, without secrets."""
        expect(is_text(key), f"read({unit}) yielded the key {key!r}: it must be a text")
        try:
            key.encode()
        except UnicodeEncodeError as error:
            message = f"read({unit}) yielded the key {key!r}, which is no UTF-8: {error}"
            raise AssertionError(message) from error
        self.expect_no_secret(f"a key of unit {unit}", key)
        return str(key)

    def record(self, unit: int, sample: Any) -> Table:
        """A sample of `unit` as it is stored, after the transform."""
        if self.transform is not None:
            sample = self.transform(sample)
            sample = True if sample is None else sample
        try:
            return to_record(sample)
        except SampleError as error:
            raise AssertionError(f"a sample of unit {unit} cannot be stored: {error}") from error

    def expect_same(self, one: Samples, other: Samples, what: str) -> None:
        """The same samples, to the byte, in the same order."""
        keys = [key for key, _ in one]
        expect(keys == [key for key, _ in other], f"{what}: other keys, or in another order")
        for (key, record), (_, again) in zip(one, other, strict=True):
            same = record.schema == again.schema
            values = [[bytes(joined(column)) for column in table.columns] for table in (record, again)]
            same = same and values[0] == values[1]
            how = "draw all that is random from `rng`, share no state"
            expect(same, f"{what}: sample {key!r} differs; {how}")

    def expect_no_secret(self, where: str, text: str) -> None:
        """None of the secrets is in a text that may be seen. The message, which may be logged, has none."""
        expect(not any(secret in text for secret in self.secrets), f"{where} holds a secret: redact it")
