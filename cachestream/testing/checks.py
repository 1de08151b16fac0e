"""The checks of a source, one promise each."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

import cloudpickle
import numpy as np

from cachestream.errors import CacheStreamError, SampleError, WorkerError
from cachestream.permutation import keyed_generator
from cachestream.sources.base import ColumnarSource, Rows, Source
from cachestream.storage.cache import Cache
from cachestream.storage.shard import MappedShard
from cachestream.worker.processes import import_path, start_python
from cachestream.worker.sampling.encode import Table, joined, to_record, to_table
from cachestream.worker.sampling.transformer import collected, to_records
from cachestream.worker.worker import start_worker

_THREADS: Final = 8
_ROUNDS: Final = 4
_WIND_DOWN_S: Final = 5.0
_CACHE_LIMIT: Final = "2GB"
_ADDRESS: Final = re.compile(r"\b0x[0-9a-f]{6,}\b")
# Descriptors that may stay open between reads: links in /proc/self/fd to what begins with one of these.
_POOLED: Final = ("socket:", "anon_inode:", "/dev/", "/proc/", "/memfd:")

Samples = list[tuple[str, Table]]


def check_source(
    source: Source | Callable[[], Source],
    *,
    secrets: Iterable[str] = (),
    transform: Callable[[Any], Any] | None = None,
    max_units: int = 8,
    timeout_s: float = 180.0,
) -> None:
    """Run every check on `source`; AssertionError for the first promise that it does not keep.

    Args:
        source: a source over little data, or better a function that makes one: then it is also
            checked that one made anew, in another process too, is the same.
        secrets: texts that must be seen nowhere, such as a password in its storage_options.
        transform: as for `start_worker`, for sources whose samples cannot be stored without.
        max_units: how many units are read; the first ones.
        timeout_s: how long the worker may take to fill a cache with them, and another process to open the
            source.
    """
    checks = SourceChecks(source, tuple(secrets), transform, max_units, timeout_s)
    for check in CHECKS:
        check(checks)


@dataclass(slots=True)
class SourceChecks:
    """The checks one by one, for a test of each; see `check_source` for the fields."""

    source: Source | Callable[[], Source]
    secrets: tuple[str, ...] = ()
    transform: Callable[[Any], Any] | None = None
    max_units: int = 8
    timeout_s: float = 180.0
    _made: Source | None = field(default=None, init=False)

    # --- what it says of itself

    def check_description(self) -> None:
        """`fingerprint`, `num_units` and `repr` are what they should be, and hold no secrets."""
        source: Any = self.subject
        fingerprint, count = source.fingerprint, source.num_units
        expect(is_text(fingerprint), "fingerprint must be a text")
        expect(
            count is None or (isinstance(count, int) and not isinstance(count, bool) and count > 0),
            f"num_units is {count!r}: it must be an int above 0, or None for an endless source",
        )
        expect(
            _ADDRESS.search(fingerprint) is None,
            f"fingerprint {fingerprint!r} holds an address, which differs in every process: "
            "name the data by values, not by repr() of objects",
        )
        for name, text in (("fingerprint", fingerprint), ("repr()", repr(source))):
            self.expect_no_secret(name, text)

    def check_fingerprint(self) -> None:
        """The fingerprint is the same of a source made anew, and in another process."""
        first = self.subject.fingerprint
        again = self.make().fingerprint
        expect(again == first, f"the fingerprint changed from {first!r} when the source was made again")
        other = fingerprint_elsewhere(self.source, self.timeout_s)
        expect(
            other == first,
            f"the fingerprint is {first!r} here and {other!r} in another process: use no hash(), id() or "
            "time",
        )

    def check_pickling(self) -> None:
        """A copy by pickle reads the same, also one made after the source was read from."""
        source = self.make()
        for when in ("before", "after"):
            try:
                copy = pickle.loads(cloudpickle.dumps(source))  # noqa: S301  our own bytes
            except Exception as error:
                raise AssertionError(
                    f"the source does not pickle {when} it was read from ({type(error).__name__}: {error}): "
                    "open connections, files and locks at their first use, and leave them out in __getstate__"
                ) from error
            same = (copy.fingerprint, copy.num_units) == (source.fingerprint, source.num_units)
            expect(same, "a pickled copy has another fingerprint or num_units")
            for unit in self.units(source):
                again = self.read(copy, unit)
                self.expect_same(self.read(source, unit), again, f"unit {unit} of a pickled copy")

    # --- what it gives

    def check_samples(self) -> None:
        """Keys are str, each occurs once; samples can be stored; the same `rng` gives the same samples."""
        source = self.subject
        units = self.units(source)
        first = {unit: self.read(source, unit) for unit in units}
        expect(any(first.values()), f"none of the units 0 to {units[-1]} has a sample that can be used")
        counts = Counter(key for samples in first.values() for key, _ in samples)
        twice = [key for key, count in counts.items() if count > 1]
        expect(
            not twice,
            f"{len(twice)} keys come more than once, such as {twice[:1]}: put the unit into the key",
        )
        for unit in reversed(units):
            self.expect_same(first[unit], self.read(source, unit), f"unit {unit}, read again")

    def check_threads(self) -> None:
        """Several threads at once, some on the same unit, read the same as one alone."""
        source = self.subject
        units = [*self.units(source)] * 2
        alone = {unit: self.read(source, unit) for unit in units}
        with ThreadPoolExecutor(_THREADS) as pool:
            together = list(pool.map(lambda unit: self.read(source, unit), units))
        for unit, samples in zip(units, together, strict=True):
            self.expect_same(alone[unit], samples, f"unit {unit}, read by several threads at once")

    def check_abandoning(self) -> None:
        """A read that is abandoned after its first sample leaves no thread and no open file."""
        self._abandon_all()
        before = threads(), open_files()  # what is there now may stay: pools, caches
        for _ in range(_ROUNDS - 1):
            self._abandon_all()
        deadline_s = time.monotonic() + _WIND_DOWN_S
        pause = threading.Event()
        while any(left := (sorted(threads() - before[0]), sorted(open_files() - before[1]))):
            expect(
                time.monotonic() < deadline_s,
                f"reads that were given up left threads {left[0]} and files {left[1]}: close them in a "
                "`finally` of the generator",
            )
            pause.wait(0.02)

    def _abandon_all(self) -> None:
        """Read the first sample of each unit, and abandon the rest."""
        for unit in self.units(self.subject):
            samples = self.subject.read(unit, keyed_generator(unit))
            with suppress(SampleError):
                next(samples, None)
            close = getattr(samples, "close", None)
            if close is not None:
                close()

    def check_range(self) -> None:
        """A unit out of range raises a CacheStreamError or IndexError."""
        source = self.subject
        for unit in [-1] + ([] if source.num_units is None else [source.num_units]):
            found, cause = f"read({unit}) of {source.num_units} units", None
            try:
                found += f" gave {len(list(source.read(unit, keyed_generator(0))))} samples"
            except (CacheStreamError, IndexError) as error:
                self.expect_no_secret(f"the error of read({unit})", f"{error} {error!r}")
                continue
            except Exception as error:  # noqa: BLE001  the source's, whatever it is
                found, cause = f"{found} raised {type(error).__name__}", error
            raise AssertionError(f"{found}: raise IndexError") from cause

    def check_rows(self) -> None:
        """`read_rows`, of a source that has it, yields the same samples as `read`."""
        source = self.subject
        if not isinstance(source, ColumnarSource):
            return
        for unit in self.units(source):
            found: Samples = []
            with suppress(SampleError):
                for item in source.read_rows(unit, keyed_generator(unit)):
                    if isinstance(item, Rows):
                        stored = to_table(item).schema
                        samples = list(item.samples)
                    else:
                        stored, samples = None, [item]
                    records = [(self.key(unit, key), to_record(sample)) for key, sample in samples]
                    expect(
                        stored is None or all(record.schema == stored for _, record in records),
                        f"rows of unit {unit} are stored as {stored}, their samples otherwise",
                    )
                    found += records
            self.expect_same(self.read(source, unit, untransformed=True), found, f"unit {unit}, read in rows")

    # --- the whole way

    def check_round_trip(self) -> None:
        """A real worker with two processes brings every sample of every unit into a cache once."""
        source = self.subject
        units = self.units(source)
        expected = {unit: [key for key, _ in self.read(source, unit)] for unit in units}
        with tempfile.TemporaryDirectory(prefix="cachestream-check-") as folder:
            found = Counter(self._fill(os.path.join(folder, "cache"), NumberedSource(source, len(units))))
        twice = [place for place, count in found.items() if count > 1]
        expect(not twice, f"(unit, sample) {twice[:3]} lie in the cache more than once")
        came = {unit: sorted(offset for other, offset in found if other == unit) for unit in units}
        lost = [unit for unit in units if expected[unit] and not came[unit]]
        expect(not lost, f"units {lost} gave samples here, and none in the worker's processes")
        for unit in units if self.transform is None else ():  # that may drop some
            whole = came[unit] == list(range(len(expected[unit])))
            expect(whole, f"of the {len(expected[unit])} samples of unit {unit} only {came[unit]} came")

    def _fill(self, path: str, source: NumberedSource) -> list[tuple[int, int]]:
        """Fill a new cache; the unit and the place in it of every sample that came."""
        with closing(Cache(path, _CACHE_LIMIT, min_free=0)) as cache:
            try:
                with start_worker(cache, source, num_workers=2, transform=self.transform) as worker:
                    complete = worker.wait(self.timeout_s)
            except WorkerError as error:
                raise AssertionError(f"the worker that was to read the source failed: {error}") from error
            expect(complete, f"the worker did not read {source.num_units} units in {self.timeout_s:.0f} s")
            failures = [row for row in cache.status().failures if row.kind in ("schema", "transform")]
            expect(not failures, f"samples were refused on their way into the cache: {failures}")
            return [source.place(key) for key in cached_keys(cache)]

    # --- reading it

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
            for item in source.read(unit, keyed_generator(unit)):
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
                f"read({unit}) raised {type(error).__name__}: {error}; raise cachestream.SampleError for "
                "what cannot be used, SourceUnavailableError for a remote that does not answer"
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
            sample = collected(self.transform(sample))
        try:
            return next(iter(to_records(sample, "")), to_record(True))
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


CHECKS: Final[tuple[Callable[[SourceChecks], None], ...]] = (
    SourceChecks.check_description,
    SourceChecks.check_fingerprint,
    SourceChecks.check_pickling,
    SourceChecks.check_samples,
    SourceChecks.check_threads,
    SourceChecks.check_abandoning,
    SourceChecks.check_range,
    SourceChecks.check_rows,
    SourceChecks.check_round_trip,
)


def is_source(value: Source | Callable[[], Source]) -> TypeGuard[Source]:
    """Return whether `value` is a source itself; a class of sources, which has its attributes, is not."""
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
    folder = cache.directory.shards
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
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise AssertionError(
                f"the source could not be opened in another process within {timeout_s:g} s"
            ) from error
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


def expect(kept: bool, message: str) -> None:
    if not kept:
        raise AssertionError(message)


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
