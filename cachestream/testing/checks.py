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
from typing import Any, Final

import cloudpickle

from cachestream.errors import CacheStreamError, SampleError, WorkerError
from cachestream.sources.base import ColumnarSource, Rows, Source
from cachestream.storage.cache import Cache
from cachestream.testing.observing import (
    CheckedSource,
    NumberedSource,
    Samples,
    cached_keys,
    expect,
    fingerprint_elsewhere,
    is_source,
    is_text,
    open_files,
    rng_of,
    threads,
)
from cachestream.worker.sampling.encode import to_record, to_table
from cachestream.worker.worker import start_worker

_THREADS: Final = 8
_ROUNDS: Final = 4
_WIND_DOWN_S: Final = 5.0
_CACHE_LIMIT: Final = "2GB"
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


class SourceChecks(CheckedSource):
    """The checks one by one, for a test of each; see `check_source` for the fields."""

    __slots__ = ()

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
        made = self.subject if is_source(self.source) else self.source
        other = fingerprint_elsewhere(made, self.timeout_s)
        expect(
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
            samples = self.subject.read(unit, rng_of(unit))
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
                found += f" gave {len(list(source.read(unit, rng_of(0))))} samples"
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
                for item in source.read_rows(unit, rng_of(unit)):
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
            whole = came[unit] == list(range(len(came[unit])))
            expect(whole, f"of unit {unit} only the samples {came[unit]} came")

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
