"""The checks of a source, one promise each."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import cloudpickle
import numpy as np

from cachestream.errors import CacheStreamError, SampleError, WorkerError
from cachestream.remote.source import Rows, RowsSource, Source
from cachestream.sampling.records import Record, to_record
from cachestream.sampling.table import to_table
from cachestream.sampling.worker import start_worker
from cachestream.storage.cache import Cache
from cachestream.testing.observing import (
    NumberedSource,
    cached_keys,
    fingerprint_elsewhere,
    is_source,
    open_files,
    threads,
)

__all__ = ["CHECKS", "SourceChecks", "check_source"]

Samples = list[tuple[str, Record]]

THREADS: Final = 8
ROUNDS: Final = 4
WIND_DOWN_S: Final = 5.0
CACHE_LIMIT: Final = "2GB"
_ADDRESS: Final = re.compile(r"\b0x[0-9a-f]{6,}\b")


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
        timeout_s: how long the worker may take to fill a cache with them.
    """
    checks = SourceChecks(source, tuple(secrets), transform, max_units, timeout_s)
    for check in CHECKS:
        check(checks)


def _expect(kept: bool, message: str) -> None:
    if not kept:
        raise AssertionError(message)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _rng(unit: int, seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed * 1_000_003 + unit))


@dataclass(slots=True)
class SourceChecks:
    """The checks one by one, for a test of each; see `check_source` for the fields."""

    source: Source | Callable[[], Source]
    secrets: tuple[str, ...] = ()
    transform: Callable[[Any], Any] | None = None
    max_units: int = 8
    timeout_s: float = 180.0
    _made: Source | None = field(default=None, init=False)

    def make(self) -> Source:
        """The source; a new one each time where a function was given."""
        given: Any = self.source
        if is_source(given):
            return given
        made: Source = given()
        _expect(is_source(made), f"{type(made).__name__} has not all of fingerprint, num_units and read")
        return made

    @property
    def subject(self) -> Source:
        """One source, for all checks that need no new one."""
        if self._made is None:
            self._made = self.make()
        return self._made

    def units(self, source: Source) -> range:
        """The units that are read."""
        count = source.num_units
        return range(self.max_units if count is None else min(count, self.max_units))

    # --- what it says of itself

    def check_description(self) -> None:
        """`fingerprint`, `num_units` and `repr` are what they should be, and hold no secrets."""
        source = self.subject
        _expect(_is_text(source.fingerprint), "fingerprint must be a text")
        count = source.num_units
        _expect(
            count is None or _is_count(count),
            f"num_units is {count!r}: it must be an int above 0, or None for an endless source",
        )
        address = _ADDRESS.search(source.fingerprint)
        _expect(
            address is None,
            f"fingerprint {source.fingerprint!r} holds an address, which differs in every process: "
            "name the data by values, not by repr() of objects",
        )
        for name, text in (("fingerprint", source.fingerprint), ("repr()", repr(source))):
            self._expect_no_secret(name, text)

    def check_fingerprint(self) -> None:
        """The fingerprint is the same of a source made anew, and in another process."""
        first = self.subject.fingerprint
        _expect(
            self.make().fingerprint == first,
            f"the fingerprint changed from {first!r} when the source was made again",
        )
        made = self.subject if is_source(self.source) else self.source
        other = fingerprint_elsewhere(made, self.timeout_s)
        _expect(
            other == first,
            f"the fingerprint is {first!r} here and {other!r} in another process: use no hash(), id() or time",
        )

    def check_pickling(self) -> None:
        """A copy by pickle reads the same, also one made after the source was read from."""
        source = self.make()
        for when in ("before", "after"):
            try:
                copy = pickle.loads(cloudpickle.dumps(source))  # noqa: S301  our own bytes
            except Exception as error:
                raise AssertionError(
                    f"the source does not pickle {when} it was read from ({type(error).__name__}: {error}): open "
                    "connections, files and locks at their first use, and leave them out in __getstate__"
                ) from error
            same = (copy.fingerprint, copy.num_units) == (source.fingerprint, source.num_units)
            _expect(same, "a pickled copy has another fingerprint or num_units")
            for unit in self.units(source):
                self._expect_same(
                    self._read(source, unit), self._read(copy, unit), f"unit {unit} of a pickled copy"
                )

    # --- what it gives

    def check_samples(self) -> None:
        """Keys are texts, each once; samples can be stored; the same `rng` brings the same samples."""
        source = self.subject
        units = self.units(source)
        first = {unit: self._read(source, unit) for unit in units}
        _expect(any(first.values()), f"none of the units 0 to {units[-1]} has a sample that can be used")
        counts = Counter(key for samples in first.values() for key, _ in samples)
        twice = [key for key, count in counts.items() if count > 1]
        _expect(
            not twice,
            f"{len(twice)} keys come more than once, such as {twice[:1]}: put the unit into the key",
        )
        for unit in reversed(units):
            self._expect_same(first[unit], self._read(source, unit), f"unit {unit}, read again")

    def check_threads(self) -> None:
        """Threads that read at once, some of them the same unit, read what one does alone."""
        source = self.subject
        units = [*self.units(source)] * 2
        alone = {unit: self._read(source, unit) for unit in units}
        with ThreadPoolExecutor(THREADS) as pool:
            together = list(pool.map(lambda unit: self._read(source, unit), units))
        for unit, samples in zip(units, together, strict=True):
            self._expect_same(alone[unit], samples, f"unit {unit}, read by several threads at once")

    def check_abandoning(self) -> None:
        """A read that is given up after its first sample leaves no thread and no open file."""
        source = self.subject
        before: tuple[set[str], set[str]] | None = None
        for _ in range(ROUNDS):
            for unit in self.units(source):
                self._begin(source, unit)
            if before is None:
                before = threads(), open_files()  # what is there now may stay: pools, caches
        assert before is not None
        deadline_s = time.monotonic() + WIND_DOWN_S
        pause = threading.Event()
        while True:
            left = sorted(threads() - before[0]), sorted(open_files() - before[1])
            if not any(left):
                return
            if time.monotonic() > deadline_s:
                break
            pause.wait(0.02)
        raise AssertionError(
            f"reads that were given up left threads {left[0]} and files {left[1]}: close them in a "
            "`finally` of the generator"
        )

    def check_range(self) -> None:
        """A unit that is not there is an error: a CacheStreamError or IndexError."""
        source = self.subject
        for unit in [-1] + ([] if source.num_units is None else [source.num_units]):
            try:
                samples = list(source.read(unit, _rng(0)))
            except (CacheStreamError, IndexError) as error:
                self._expect_no_secret(f"the error of read({unit})", f"{error} {error!r}")
            except Exception as error:
                raise AssertionError(
                    f"read({unit}) of {source.num_units} units raised {type(error).__name__}: raise IndexError"
                ) from error
            else:
                raise AssertionError(
                    f"read({unit}) of {source.num_units} units gave {len(samples)} samples: raise IndexError"
                )

    def check_rows(self) -> None:
        """What comes in columns, from a source that can, is what `read` gives."""
        source = self.subject
        if not isinstance(source, RowsSource):
            return
        for unit in self.units(source):
            found: Samples = []
            with suppress(SampleError):
                for item in source.read_rows(unit, _rng(unit)):
                    if isinstance(item, Rows):
                        stored = to_table(item).schema
                        samples = list(item.samples)
                    else:
                        stored, samples = None, [item]
                    records = [(self._key(unit, key), to_record(sample)) for key, sample in samples]
                    _expect(
                        stored is None or all(record.schema == stored for _, record in records),
                        f"rows of unit {unit} are stored as {stored}, their samples otherwise",
                    )
                    found += records
            self._expect_same(
                self._read(source, unit, untransformed=True), found, f"unit {unit}, read in rows"
            )

    # --- the whole way

    def check_round_trip(self) -> None:
        """A real worker with two processes brings every sample of every unit into a cache once."""
        source = self.subject
        units = self.units(source)
        expected = {unit: [key for key, _ in self._read(source, unit)] for unit in units}
        with tempfile.TemporaryDirectory(prefix="cachestream-check-") as folder:
            found = Counter(self._fill(os.path.join(folder, "cache"), NumberedSource(source, len(units))))
        twice = [place for place, count in found.items() if count > 1]
        _expect(not twice, f"(unit, sample) {twice[:3]} lie in the cache more than once")
        came = {unit: sorted(offset for other, offset in found if other == unit) for unit in units}
        lost = [unit for unit in units if expected[unit] and not came[unit]]
        _expect(not lost, f"units {lost} gave samples here, and none in the worker's processes")
        for unit in units if self.transform is None else ():  # that may drop some
            whole = came[unit] == list(range(len(came[unit])))
            _expect(whole, f"of unit {unit} only the samples {came[unit]} came")

    def _fill(self, path: str, source: NumberedSource) -> list[tuple[int, int]]:
        """Fill a new cache; the unit and the place in it of every sample that came."""
        with closing(Cache(path, CACHE_LIMIT, min_free=0)) as cache:
            try:
                with start_worker(cache, source, num_workers=2, transform=self.transform) as worker:
                    complete = worker.wait(self.timeout_s)
            except WorkerError as error:
                raise AssertionError(f"the worker that was to read the source failed: {error}") from error
            _expect(complete, f"the worker did not read {source.num_units} units in {self.timeout_s:.0f} s")
            failures = [row for row in cache.status().failures if row.kind in ("schema", "transform")]
            _expect(not failures, f"samples were refused on their way into the cache: {failures}")
            return [source.place(key) for key in cached_keys(cache)]

    # --- reading

    def _read(self, source: Source, unit: int, *, untransformed: bool = False) -> Samples:
        """The samples of `unit` as they would be stored; those before a SampleError, if there is one.

        `untransformed`: as the source gives them.
        """
        samples: Samples = []
        try:
            for item in source.read(unit, _rng(unit)):
                _expect(_is_pair(item), f"read({unit}) yielded {item!r}, not (key, sample)")
                record = to_record(item[1]) if untransformed else self._record(unit, item[1])
                samples.append((self._key(unit, item[0]), record))
        except SampleError as error:  # a unit, or the rest of it, that cannot be used: allowed, and counted
            self._expect_no_secret(f"the error of read({unit})", f"{error} {error!r}")
        except (CacheStreamError, AssertionError):
            raise
        except Exception as error:
            raise AssertionError(
                f"read({unit}) raised {type(error).__name__}: {error}; raise cachestream.SampleError for what "
                "cannot be used, SourceUnavailableError for a remote that does not answer"
            ) from error
        return samples

    def _key(self, unit: int, key: Any) -> str:
        _expect(_is_text(key), f"read({unit}) yielded the key {key!r}: it must be a text")
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise AssertionError(
                f"read({unit}) yielded the key {key!r}, which is no UTF-8: {error}"
            ) from error
        self._expect_no_secret(f"a key of unit {unit}", key)
        return str(key)

    def _record(self, unit: int, sample: Any) -> Record:
        if self.transform is not None:
            sample = self.transform(sample)
            sample = True if sample is None else sample
        try:
            return to_record(sample)
        except SampleError as error:
            raise AssertionError(f"a sample of unit {unit} cannot be stored: {error}") from error

    def _begin(self, source: Source, unit: int) -> None:
        samples = source.read(unit, _rng(unit))
        with suppress(SampleError):
            next(samples, None)
        close = getattr(samples, "close", None)
        if close is not None:
            close()

    def _expect_same(self, one: Samples, other: Samples, what: str) -> None:
        keys = [key for key, _ in one]
        _expect(keys == [key for key, _ in other], f"{what}: other keys, or in another order")
        for (key, record), (_, again) in zip(one, other, strict=True):
            same = (record.schema, record.shapes) == (again.schema, again.shapes) and all(
                bytes(value) == bytes(other) for value, other in zip(record.values, again.values, strict=True)
            )
            _expect(
                same, f"{what}: sample {key!r} differs; draw all that is random from `rng`, share no state"
            )

    def _expect_no_secret(self, where: str, text: str) -> None:
        # The secret itself is not repeated: this text may be logged.
        _expect(not any(secret in text for secret in self.secrets), f"{where} holds a secret: redact it")


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
