"""A process may be killed at any step: nothing is torn, lost, miscounted or left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachestream.schema import Span
from cachestream.shard_format import ShardContent
from cachestream.storage import cache as cache_module
from cachestream.storage import publish as publish_module
from cachestream.storage.cache import Cache
from cachestream.storage.catalogue import Catalogue
from cachestream.storage.publish import Publisher, UnitProgress
from cachestream.storage.reservations import Reservations
from cachestream.storage.shard import shard_path
from cachestream.storage.tables import Reservation, Tables
from tests.storage.steps import Crash, crash_everywhere, crash_twice, steps_of
from tests.storage.support import Line, content, fork, keys_in, new_cache, publish, use_all

SHARD_BYTES = 140_000
FIRST = 5  # shards that the template holds: all of them are looked at after every kill
LIMIT = 3 * FIRST * SHARD_BYTES


@pytest.fixture
def template(fast_path: Path) -> Path:
    """A cache of five shards with equal use, room for more, and a pass with an open claim."""
    path = fast_path / "template"
    with new_cache(path, LIMIT) as cache:
        with cache.catalogue.transaction() as tables:
            tables.insert_pass("{}", 1000, 0)
            tables.insert_claim(1, 0, 1000, "nobody")
        for number in range(FIRST):
            publish(cache, shard(number))
        use_all(cache)
    return path


@pytest.fixture
def full(template: Path) -> Path:
    """The same without room for another shard: publishing evicts."""
    with Cache(template) as cache:
        cache.size_limit = cache.reservations.room().used_bytes + 20_000
    return template


def shard(number: int) -> ShardContent:
    fill = {"source": "s", "plan": "{}", "length": 1000, "spans": [[number, 0, number + 1, 0]]}
    return content(10 * number, size_bytes=SHARD_BYTES, fill=fill)


def keys_of(numbers: range | list[int]) -> set[str]:
    return {f"k{10 * number + i}" for number in numbers for i in range(3)}


def publish_next(cache: Cache, line: Line) -> None:
    progress = UnitProgress(1, claims=((1, FIRST + 1, 0),))
    shard_id = publish(cache, shard(FIRST), spans=[Span((FIRST, 0), (FIRST + 1, 0))], progress=progress)
    line.say(f"published {shard_id}")


def check_published(cache: Cache, crash: Crash) -> None:
    """Check that the new shard exists with its progress or neither does, and that only evictions lose shards."""
    keys = set(keys_in(cache))
    status = cache.status()
    with cache.catalogue.reading() as tables:
        ((claim, _),) = tables.claims(1)
    is_there = keys_of([FIRST]) <= keys
    assert is_there == bool(keys & keys_of([FIRST]))
    assert claim.position == (FIRST + 1 if is_there else 0), "samples and progress are one"
    if crash.said:
        assert is_there, "what was acknowledged is there"
    lost = keys_of(range(FIRST)) - keys
    assert len(lost) == status.evicted_samples == 3 * status.evicted_shards
    assert status.evicted_shards <= 2, "evicted once"
    assert keys <= keys_of(range(FIRST + 1))


@pytest.mark.e2e
def test_publishing(template: Path, fast_path: Path) -> None:
    steps = crash_everywhere(template, fast_path, publish_next, check_published)
    assert {"replace shards/.safetensors", "COMMIT", "half written"} <= set(steps)


@pytest.mark.e2e
def test_publishing_that_evicts(full: Path, fast_path: Path) -> None:
    steps = crash_everywhere(full, fast_path, publish_next, check_published)
    assert "unlink shards/.safetensors" in steps


@pytest.mark.e2e
def test_evicting(template: Path, fast_path: Path) -> None:
    def evict(cache: Cache, line: Line) -> None:
        line.say(f"freed {cache.evict(to=0)}")

    def check(cache: Cache, crash: Crash) -> None:
        assert cache.num_shards in (0, FIRST), "all in one transaction"
        assert cache.status().evicted_shards == FIRST - cache.num_shards
        assert set(keys_in(cache)) == (keys_of(range(FIRST)) if cache.num_shards else set())
        if crash.said:
            assert cache.num_shards == 0

    steps = crash_everywhere(template, fast_path, evict, check)
    assert steps.count("unlink shards/.safetensors") == FIRST


@pytest.mark.e2e
def test_leasing(template: Path, fast_path: Path) -> None:
    def lease(cache: Cache, line: Line) -> None:
        snapshot, _held = cache.take_snapshot()
        line.say(f"took {snapshot.num_samples}")

    def check(cache: Cache, crash: Crash) -> None:
        with cache.catalogue.reading() as tables:
            (uses, last_used) = tables.shard_columns("uses", "last_used")
            clock = tables.meta("clock", 0)
        assert uses.tolist() == last_used.tolist() == [clock] * FIRST
        if crash.said:
            assert clock == 2, "that of the template, and this one"
        assert cache.status().leases == 0
        cache.evict(to=0)
        assert cache.num_shards == 0, "the dead hold nothing"

    crash_everywhere(template, fast_path, lease, check)


@pytest.mark.e2e
def test_putting_a_shard_aside(template: Path, fast_path: Path) -> None:
    def quarantine(cache: Cache, line: Line) -> None:
        cache.quarantine(3, "x: broken")
        line.say("aside")

    def check(cache: Cache, crash: Crash) -> None:
        assert keys_of([0, 1, *range(3, FIRST)]) <= set(keys_in(cache)), "the others stay"
        check_counts(cache)
        if crash.said:
            assert cache.num_shards == FIRST - 1
            assert cache.status().quarantined == 1

    crash_everywhere(template, fast_path, quarantine, check)


@pytest.mark.e2e
def test_forgetting_a_shard_without_a_file(template: Path, fast_path: Path) -> None:
    os.unlink(shard_path(str(template), 3))

    def repair(cache: Cache, line: Line) -> None:
        cache.verify(repair=True)
        line.say("forgotten")

    def check(cache: Cache, crash: Crash) -> None:
        assert keys_of([0, 1, *range(3, FIRST)]) <= set(keys_in(cache)), "the others stay"
        check_counts(cache)
        if crash.said:
            assert cache.num_shards == FIRST - 1

    def recover(cache: Cache) -> None:
        cache.recover()
        with cache.catalogue.reading() as tables:
            is_known = tables.shard(3) is not None
        if is_known:
            check_counts(cache)
            cache.verify(repair=True)

    crash_everywhere(template, fast_path, repair, check, recover=recover)


def check_counts(cache: Cache) -> None:
    """Check that missing shards are counted: the count tells the worker to fetch again."""
    gone = FIRST - cache.num_shards
    assert cache.status().evicted_shards == gone
    assert sum(row.count for row in cache.status().failures) == 3 * gone


@pytest.mark.e2e
def test_lowering_the_limit(template: Path, fast_path: Path) -> None:
    size_limit = LIMIT // 2

    def lower(cache: Cache, line: Line) -> None:
        setattr(cache_module, "_WRITERS_TIMEOUT_S", 0.1)  # noqa: B010  nobody writes
        cache.size_limit = size_limit
        line.say("lowered")

    def check(cache: Cache, crash: Crash) -> None:
        assert cache.size_limit in (LIMIT, size_limit)
        if crash.said:
            assert cache.size_limit == size_limit
            assert cache.num_shards < FIRST
        assert len(keys_in(cache)) == 3 * (FIRST - cache.status().evicted_shards)

    # Killed before it has evicted, the cache is over its new limit: the worker sees to that every second.
    crash_everywhere(template, fast_path, lower, check, recover=Cache.enforce_limit)


@pytest.mark.e2e
def test_clearing_the_cache(template: Path, fast_path: Path) -> None:
    def clear(cache: Cache, line: Line) -> None:
        cache.clear()
        line.say("cleared")

    def check(cache: Cache, crash: Crash) -> None:
        if crash.said:
            assert cache.num_shards == 0
            assert cache.status().pass_number == 0
        cache.clear()
        assert cache.num_samples == 0

    crash_everywhere(template, fast_path, clear, check)


@pytest.mark.e2e
def test_creating_a_cache(fast_path: Path) -> None:
    path = fast_path / "crashed"

    def create(_cache: Cache, line: Line) -> None:
        line.say(f"made {new_cache(path, LIMIT).cache_id}")

    def check(cache: Cache, crash: Crash) -> None:
        if crash.said:
            assert crash.said == (f"made {cache.cache_id}",)
            assert cache.size_limit == LIMIT
        assert publish(cache, shard(0)) == 1

    crash_everywhere(fast_path / "nothing", fast_path, create, check)


@pytest.mark.e2e
@pytest.mark.parametrize("damage", ["deleted", pytest.param("garbage", marks=pytest.mark.slow)])
def test_rebuilding_a_lost_catalogue(template: Path, fast_path: Path, damage: str) -> None:
    crash_everywhere(
        template, fast_path, rebuild(fast_path / "crashed", damage), check_rebuilt, books_hold=False
    )


def rebuild(path: Path, damage: str) -> Callable[[Cache, Line], None]:
    def run(cache: Cache, line: Line) -> None:
        cache.close()
        os.unlink(path / "catalogue.sqlite")
        if damage == "garbage":
            (path / "catalogue.sqlite").write_bytes(b"garbage" * 1000)
        again = Cache(path)
        line.say(f"rebuilt {again.num_samples}")

    return run


def check_rebuilt(cache: Cache, crash: Crash) -> None:
    assert set(keys_in(cache)) == keys_of(range(FIRST)), "recovery removed shards as unknown"
    with cache.catalogue.reading() as tables:
        assert tables.meta("cache_id") == cache.cache_id
    if crash.said:
        assert crash.said == (f"rebuilt {3 * FIRST}",)


@pytest.mark.e2e
def test_repairing(template: Path, fast_path: Path) -> None:
    with Cache(template) as cache:
        shards = Path(cache.directory.shards)
        whole = (shards / "000000000002.safetensors").read_bytes()
        (shards / "000000000002.safetensors").write_bytes(whole[:-1] + b"!")
        (shards / "000000000004.safetensors").unlink()
        (shards / "000000000777.safetensors").write_bytes(whole)
        (shards / "000000000778.tmp").write_bytes(whole)
        (shards / "notes.txt").write_bytes(whole)

    def repair(cache: Cache, line: Line) -> None:
        line.say(str(cache.verify(repair=True)))

    def check(cache: Cache, crash: Crash) -> None:
        assert set(keys_in(cache)) == keys_of([0, 2, *range(4, FIRST)])
        if crash.said:
            assert crash.said[0].endswith("1 corrupt, 1 missing, 3 unknown files; repaired")

    steps = crash_everywhere(
        template,
        fast_path,
        repair,
        check,
        recover=lambda cache: cache.verify(repair=True),
        books_hold=False,
    )
    assert "replace quarantine/.safetensors" in steps


@pytest.mark.e2e
def test_recovering_what_a_dead_writer_left(template: Path, fast_path: Path) -> None:
    """A writer is killed while writing, an evictor before its unlink, and then the process that clears up."""

    def die(line: Line) -> None:
        with Cache(template) as cache:
            with cache.catalogue.transaction() as tables:
                row = tables.shard(2)
                assert row is not None
                tables.delete_shards([2])
                tables.add("evicted_shards", 1)
                tables.add("evicted_samples", 3)
                tables.insert_reservation(Reservation(2, row.size_bytes, "dead", doomed=True))
                tables.insert_reservation(Reservation(77, 500_000, "dead", doomed=False))
                tables.set_meta("last_shard_id", 77)
            Path(cache.directory.temporary_shard(77)).write_bytes(b"half" * 10_000)
            (Path(cache.directory.leases) / "dead.owner").touch()
            line.say("dead")

    assert fork(die).wait() == 0

    def check(cache: Cache, crash: Crash) -> None:
        del crash
        assert set(keys_in(cache)) == keys_of([0, *range(2, FIRST)])
        assert publish(cache, shard(FIRST)) == 78

    crash_everywhere(template, fast_path, lambda cache, _line: cache.recover(), check)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_publishing_and_then_the_recovery_from_it_killed_at_every_step(full: Path, fast_path: Path) -> None:
    crash_twice(full, fast_path, publish_next, lambda cache, _line: cache.recover(), check_published)


# --- the order that a power loss asks for


@pytest.mark.e2e
def test_the_steps_of_publishing_are_in_the_order_that_survives_a_power_loss(
    template: Path, fast_path: Path
) -> None:
    assert_durable_order(steps_of(template, fast_path, publish_next))


def assert_durable_order(steps: list[str]) -> None:
    """Check that data, then its name, then the row reach the disk, each before the next."""
    commits = [i for i, step in enumerate(steps) if step == "COMMIT"]
    data, name = steps.index("fsync shards/.tmp"), steps.index("replace shards/.safetensors")
    folder = steps.index("fsync crashed/shards")
    row = steps.index("INSERT INTO shards")
    assert commits[0] < steps.index("create shards/.tmp"), "reserved before it is written"
    assert data < name < folder < row < commits[-1]
    assert max(i for i, step in enumerate(steps) if step in {"write", "half written"}) < data
    assert "fsync shards/.tmp" not in steps[data + 1 :], "never synced again"


# --- known bugs, put back in: the tests above must find them, as tests/faults shows of others


def nothing(*_: object) -> None:
    """Replace a function that a mutation leaves out."""


def unlink_before_row() -> None:
    real = Reservations._doom

    def doom(self: Reservations, tables: Tables, victims: list[object], owner: str) -> None:
        self._remove_files([row.id for row in victims])  # type: ignore[attr-defined]
        real(self, tables, victims, owner)  # type: ignore[arg-type]

    Reservations._doom = doom  # type: ignore[assignment, method-assign]


def credit_before_unlink() -> None:
    def unlink(self: Reservations, doomed: list[int], owner: str) -> None:
        del owner
        with self._catalogue.transaction() as tables:
            tables.delete_reservations(doomed)
        self._remove_files(doomed)

    Reservations._unlink = unlink  # type: ignore[method-assign]


def late_accounting() -> None:
    real = Tables.insert_reservation

    def insert(self: Tables, reservation: Reservation) -> None:
        size = reservation.size_bytes if reservation.doomed else 0
        real(self, Reservation(reservation.id, size, reservation.owner, reservation.doomed))

    Tables.insert_reservation = insert  # type: ignore[method-assign]


def row_before_name() -> None:
    real_publish, real_move, later = Publisher.publish, publish_module.move, []  # type: ignore[attr-defined]
    publish_module.move = lambda *names: later.append(names)  # type: ignore[attr-defined]

    def publish(self: Publisher, *args: object, **named: object) -> list[int] | None:
        shard_ids = real_publish(self, *args, **named)  # type: ignore[arg-type]
        for names in later:
            real_move(*names)
        return shard_ids

    Publisher.publish = publish  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        (unlink_before_row, "1 missing"),
        (credit_before_unlink, "on disk, but not in the books"),
        (late_accounting, "on disk, but not in the books"),
        (row_before_name, "1 missing"),
    ],
)
def test_a_known_bug_of_publishing_and_evicting_is_found(
    full: Path, fast_path: Path, mutation: Callable[[], None], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        crash_everywhere(full, fast_path, publish_next, check_published, mutation=mutation)


@pytest.mark.slow
def test_a_rebuilt_catalogue_that_is_in_its_place_before_it_is_whole_is_found(
    template: Path, fast_path: Path
) -> None:
    """A former bug: killed between the tables and the rows, the cache was taken for an empty one."""

    def too_early() -> None:
        real = Catalogue.create

        def create(self: Catalogue, fill: Callable[[Tables], None]) -> None:
            settings = {"cache_id": "x", "size_limit": LIMIT, "min_free": 0, "eviction": "lru"}

            def settle(tables: Tables) -> None:
                for key, value in settings.items():
                    tables.set_meta(key, value)

            real(self, settle)
            self.close()
            place = os.path.join(os.path.dirname(self.path), "catalogue.sqlite")
            os.rename(self.path, place)
            with Catalogue(place).transaction() as tables:
                fill(tables)
            os.rename(place, self.path)

        Catalogue.create = create  # type: ignore[method-assign]

    action = rebuild(fast_path / "crashed", "deleted")
    with pytest.raises(AssertionError, match="recovery removed shards as unknown"):
        crash_everywhere(template, fast_path, action, check_rebuilt, mutation=too_early, books_hold=False)


@pytest.mark.slow
def test_a_recovery_that_forgets_the_dead_is_found(full: Path, fast_path: Path) -> None:
    def recover(cache: Cache) -> None:
        Reservations._abandoned = lambda *_: []  # type: ignore[method-assign]
        cache.recover()

    with pytest.raises(AssertionError):
        crash_everywhere(full, fast_path, publish_next, check_published, recover=recover)
