"""The part in C by itself: it gathers what numpy would, in order, beside the interpreter, and ends when it should."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.support import wait_until

if TYPE_CHECKING:
    from cachestream.training.batches import _gather
    from cachestream.training.batches._gather import Queue
else:
    NOT_BUILT = "the part in C is not built: no C compiler, no Python.h, or a Python without the GIL"
    _gather = pytest.importorskip("cachestream.training.batches._gather", reason=NOT_BUILT)
    Queue = _gather.Queue

ROOT: Final = Path(__file__).parents[3]
DEADLINE_S: Final = 120.0
MOST_WAITING: Final = 4096
GUARD_BYTES: Final = 64

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


@contextmanager
def new_queue(threads: int = 1) -> Iterator[Queue]:
    """A Queue whose threads have ended before the memory of its tasks goes."""
    queue = Queue(threads)
    try:
        yield queue
    finally:
        assert queue.close(DEADLINE_S)


class Table:
    """Shards of rows at random: `fields[f][s]` is uint8 [rows of shard s, bytes of a row of field f]."""

    def __init__(self, row_bytes: list[int], shard_rows: list[int], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.row_bytes = row_bytes
        self.fields = [[rng.integers(0, 256, (rows, n), np.uint8) for rows in shard_rows] for n in row_bytes]
        self._bases = [np.array([address(shard) for shard in field], np.int64) for field in self.fields]
        self.columns = tuple(
            number for base, n in zip(self._bases, row_bytes, strict=True) for number in (address(base), n)
        )


class Task:
    """Rows of a table, gathered between guards."""

    def __init__(self, table: Table, places: list[tuple[int, int]], *, non_temporal: bool = False) -> None:
        self._table = table
        self._shards = np.array([shard for shard, _ in places], np.int64)
        self._rows = np.array([row for _, row in places], np.int64)
        self._outs = [np.full(len(places) * n + 2 * GUARD_BYTES, 0xA5, np.uint8) for n in table.row_bytes]
        self._places = places
        self._non_temporal = non_temporal

    def submit(self, queue: Queue) -> int:
        return queue.submit(*self._arguments())

    def gather(self) -> None:
        _gather.gather(*self._arguments())

    def _arguments(self) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...], bool]:
        outs = tuple(address(out) + GUARD_BYTES for out in self._outs)
        shards, rows = address(self._shards), address(self._rows)
        return shards, rows, len(self._places), self._table.columns, outs, self._non_temporal

    def check(self) -> None:
        guard = bytes([0xA5]) * GUARD_BYTES
        for field, out in zip(self._table.fields, self._outs, strict=True):
            rows = b"".join(field[shard][row].tobytes() for shard, row in self._places)
            assert out.tobytes() == guard + rows + guard


class Endless:
    """Tasks that take many seconds together; each marks its beginning and its end."""

    COUNT: Final = 4000

    def __init__(self) -> None:
        block = 1 << 20
        copies = 200
        self._zero = np.zeros(1, np.int64)
        self._one = np.ones(1, np.int64)
        self._from, self._to = np.ones(block, np.uint8), np.empty(block, np.uint8)
        self._bases = np.array([address(self._one), address(self._from)], np.int64)
        mark = (address(self._bases), 8)
        self._columns = (*mark, *(address(self._bases) + 8, block) * copies, *mark)
        self._middle = (address(self._to),) * copies
        self.begun, self.ended = np.zeros(self.COUNT, np.int64), np.zeros(self.COUNT, np.int64)

    def submit(self, queue: Queue, number: int) -> int:
        outs = (address(self.begun) + 8 * number, *self._middle, address(self.ended) + 8 * number)
        return queue.submit(address(self._zero), address(self._zero), 1, self._columns, outs, True)

    def submit_all(self, queue: Queue) -> int:
        """The number of the last one, when the first one runs."""
        last = [self.submit(queue, number) for number in range(self.COUNT)][-1]
        wait_until(lambda: bool(self.begun.any()), "a task runs")
        return last

    def whole(self) -> int:
        """The number of tasks that are done; none is half done, and each was begun after those before it."""
        assert self.begun.tolist() == self.ended.tolist()
        done = int(self.ended.sum())
        assert self.ended[:done].all()
        return done


PLACES = st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
    lambda shard_rows: st.tuples(
        st.just(shard_rows),
        st.lists(
            st.lists(
                st.integers(0, len(shard_rows) - 1).flatmap(
                    lambda shard: st.tuples(st.just(shard), st.integers(0, shard_rows[shard] - 1))
                ),
                max_size=12,
            ),
            max_size=4,
        ),
    )
)


@pytest.mark.e2e
@given(
    threads=st.integers(1, 2),
    row_bytes=st.lists(st.one_of(st.integers(0, 260), st.integers(0, 200_000)), max_size=4),
    places=PLACES,
    seed=st.integers(0, 2**32 - 1),
    non_temporal=st.booleans(),
)
def test_the_rows_asked_for_are_gathered_and_nothing_is_written_beside_them(
    threads: int,
    row_bytes: list[int],
    places: tuple[list[int], list[list[tuple[int, int]]]],
    seed: int,
    non_temporal: bool,
) -> None:
    shard_rows, batches = places
    table = Table(row_bytes, shard_rows, seed)
    tasks = [Task(table, batch, non_temporal=non_temporal) for batch in batches]
    with new_queue(threads) as queue:
        numbers = [task.submit(queue) for task in tasks]
        assert numbers == list(range(1, len(tasks) + 1))
        assert queue.wait(len(tasks), DEADLINE_S)
        assert queue.completed() == len(tasks)
    for task in tasks:
        task.check()


def test_rows_of_each_size_that_is_copied_in_a_way_of_its_own_are_gathered() -> None:
    table = Table([0, 1, 2, 3, 4, 5, 8, 9, 16, 63, 64, 65, 65_535, 65_536, 65_537], [3, 1, 4], seed=0)
    task = Task(table, [(0, 2), (2, 3), (1, 0), (0, 2), (2, 0), (2, 1)])
    with new_queue() as queue:
        assert queue.wait(task.submit(queue), DEADLINE_S)
    task.check()


@pytest.mark.parametrize("non_temporal", [False, True])
@pytest.mark.parametrize("row_bytes", [4095, 4096, 4097, 5003, 131_072])
def test_rows_of_large_batches_are_gathered_whole(row_bytes: int, non_temporal: bool) -> None:
    rng = np.random.default_rng(row_bytes)
    table = Table([row_bytes], [7, 30], seed=row_bytes)
    places = [
        (shard, int(rng.integers([7, 30][shard]))) for shard in rng.integers(0, 2, 4_000_000 // row_bytes)
    ]
    task = Task(table, places, non_temporal=non_temporal)
    with new_queue() as queue:
        assert queue.wait(task.submit(queue), DEADLINE_S)
    task.check()
    in_this_thread = Task(table, places, non_temporal=non_temporal)
    in_this_thread.gather()
    in_this_thread.check()


@pytest.mark.e2e
@pytest.mark.parametrize("threads", [1, 2, 16])
def test_whoever_waits_for_a_task_finds_it_and_all_before_it_done(threads: int) -> None:
    table = Table([3, 1, 70_000], [40, 9], seed=threads)
    rng = np.random.default_rng(threads)
    tasks = [
        Task(table, [(0, int(row)) for row in rng.integers(0, 40, rng.integers(0, 60))]) for _ in range(60)
    ]
    with new_queue(threads) as queue:
        numbers = [task.submit(queue) for task in tasks]
        checked = 0
        for number in numbers[::7]:
            assert queue.wait(number, DEADLINE_S)
            completed = queue.completed()
            assert completed >= number
            for task in tasks[checked:completed]:
                task.check()
            checked = completed
        assert queue.wait(numbers[-1], DEADLINE_S)
        for task in tasks[checked:]:
            task.check()


@pytest.mark.e2e
def test_many_threads_of_python_wait_at_once_each_for_a_task_of_its_own() -> None:
    table = Table([50_000, 8], [30], seed=0)
    tasks = [Task(table, [(0, (n * k) % 30) for k in range(20)]) for n in range(200)]
    found: list[bool] = []
    with new_queue(2) as queue:
        numbers = [task.submit(queue) for task in tasks]

        def wait(first: int) -> None:
            for task, number in zip(tasks[first::24], numbers[first::24], strict=True):
                found.append(queue.wait(number, DEADLINE_S))
                task.check()

        threads = [threading.Thread(target=wait, args=(first,)) for first in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert found == [True] * len(tasks)


@pytest.mark.e2e
def test_a_wait_ends_with_its_time() -> None:
    endless = Endless()
    with new_queue() as queue:
        last = endless.submit_all(queue)
        assert [queue.wait(last, timeout_s) for timeout_s in (0.0, -1.5, 0.02, float("nan"))] == [False] * 4
        assert not queue.wait(last, 1e-300)


def test_what_is_done_is_waited_for_in_no_time() -> None:
    table = Table([8], [4], seed=0)
    task = Task(table, [(0, 3), (0, 0)])
    with new_queue() as queue:
        assert queue.wait(0, 0.0)
        number = task.submit(queue)
        assert queue.wait(number, float("inf"))
        assert queue.wait(number, 0.0)


def test_a_task_that_was_never_submitted_is_not_waited_for() -> None:
    with new_queue() as queue, pytest.raises(ValueError, match="no task has this number yet"):
        queue.wait(1, DEADLINE_S)


@pytest.mark.e2e
def test_python_goes_on_while_another_of_its_threads_waits() -> None:
    """The one that goes on ends the wait of the other, which would last until all is done if it kept the GIL."""
    endless = Endless()
    turns = 0
    with new_queue() as queue:
        last = endless.submit_all(queue)

        def count() -> None:
            nonlocal turns
            while turns < 100_000:
                turns += 1
            queue.close(DEADLINE_S)

        thread = threading.Thread(target=count)
        thread.start()
        assert not queue.wait(last, DEADLINE_S)
        thread.join(DEADLINE_S)
    assert turns == 100_000
    assert endless.whole() < endless.COUNT


@pytest.mark.e2e
def test_python_goes_on_while_rows_are_gathered() -> None:
    endless = Endless()
    turns = 0
    with new_queue() as queue:
        last = endless.submit_all(queue)
        while turns < 100_000:
            turns += 1
        assert queue.completed() < last


@pytest.mark.e2e
@pytest.mark.parametrize("threads", [1, 2])
def test_a_queue_that_is_closed_ends_what_runs_and_begins_nothing_more(threads: int) -> None:
    endless = Endless()
    queue = Queue(threads)
    last = endless.submit_all(queue)
    queue.wait(last, 0.02)  # the second thread comes to help
    queue.close(0.0)
    assert queue.close(DEADLINE_S)
    done = endless.whole()
    assert 0 < done < endless.COUNT
    assert queue.completed() == done
    assert queue.close(0.0)
    assert queue.wait(done, 0.0)
    assert not queue.wait(last, DEADLINE_S)
    with pytest.raises(RuntimeError, match="closed"):
        endless.submit(queue, 0)


@pytest.mark.e2e
def test_all_who_wait_are_told_when_the_queue_is_closed() -> None:
    endless = Endless()
    found: list[bool] = []
    with new_queue(2) as queue:
        last = endless.submit_all(queue)
        threads = [
            threading.Thread(target=lambda: found.append(queue.wait(last, 2 * DEADLINE_S))) for _ in range(16)
        ]
        for thread in threads:
            thread.start()
        assert queue.close(DEADLINE_S)
        for thread in threads:
            thread.join(DEADLINE_S)
    assert found == [False] * 16


@pytest.mark.e2e
@pytest.mark.parametrize("threads", [1, 2])
def test_a_queue_that_is_dropped_amid_its_work_ends_by_itself(threads: int) -> None:
    before = os.listdir("/proc/self/task")
    endless = Endless()
    queue = Queue(threads)
    queue.wait(endless.submit_all(queue), 0.02)
    own = set(os.listdir("/proc/self/task")).difference(before)
    assert own
    del queue
    wait_until(lambda: own.isdisjoint(os.listdir("/proc/self/task")), "its threads have ended")
    assert 0 < endless.whole() < endless.COUNT


def test_a_queue_without_tasks_is_closed_and_dropped() -> None:
    assert Queue(3).close(0.0)
    Queue()


@pytest.mark.e2e
def test_more_than_so_many_tasks_at_once_are_refused_and_those_before_are_done() -> None:
    endless = Endless()
    with new_queue() as queue:
        last = completed = 0

        def submit_until_refused() -> None:
            nonlocal last, completed
            for _ in range(100 * MOST_WAITING):
                completed = queue.completed()
                last = endless.submit(queue, 0)

        with pytest.raises(RuntimeError, match="too many tasks wait"):
            submit_until_refused()
        assert last - completed >= MOST_WAITING
        assert last - queue.completed() <= MOST_WAITING
        assert queue.wait(completed + 1, DEADLINE_S)
        assert endless.submit(queue, 1) == last + 1


@pytest.mark.e2e
def test_numbers_go_on_when_tasks_have_gone_round_the_ring_several_times() -> None:
    table = Table([5, 8], [7, 7], seed=0)
    tasks = [Task(table, [(n % 2, n % 7)]) for n in range(50)]
    with new_queue(2) as queue:
        for number in range(3 * MOST_WAITING):
            assert tasks[number % 50].submit(queue) == number + 1
            if number % 40 == 39:
                assert queue.wait(number + 1, DEADLINE_S)
        assert queue.wait(3 * MOST_WAITING, DEADLINE_S)
    for task in tasks:
        task.check()


@pytest.mark.parametrize("threads", [0, -1, 17])
def test_a_number_of_threads_that_makes_no_sense_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=rf"threads={threads}: give 1 to 16"):
        Queue(threads)


Arguments = list[tuple[Any, ...]]
OF_A_WRONG_TYPE: Final[dict[str, Arguments]] = {
    "submit": [
        *((), (0, 0, 0, (), ()), (0, 0, 0, (), (), 0, 0), (0, 0, 0, [], (), 0), (0, 0, 0, (), [], 0)),
        *(("0", 0, 0, (), (), 0), (0, None, 0, (), (), 0), (0, 0, 0.5, (), (), 0)),
        *((0, 0, 0, ("0", 0), (0,), 0), (0, 0, 0, (0, "0"), (0,), 0), (0, 0, 0, (0, 0), (None,), 0)),
    ],
    "wait": [(), (0,), (0, 0.0, 0), ("0", 0.0), (0, "0"), (0, None)],
    "close": [(), ("0",), (0, 0)],
}
OF_A_WRONG_VALUE: Final[dict[str, Arguments]] = {
    "submit": [
        *(
            (0, 0, 0, (0,), (0,), 0),
            (0, 0, 0, (), (0,), 0),
            (0, 0, -1, (), (), 0),
            (0, 0, 0, (0, -1), (0,), 0),
        ),
        (0, 0, 0, (), (), np.zeros(2)),  # neither true nor false
    ],
}
TOO_LARGE: Final[dict[str, Arguments]] = {
    "submit": [(2**63, 0, 0, (), (), 0), (0, 0, 2**64, (), (), 0), (0, 0, 0, (-(2**64), 0), (0,), 0)],
    "wait": [(-1, 0.0), (2**64, 0.0)],
}
WRONG: Final = [
    (method, error, arguments)
    for error, methods in (
        (TypeError, OF_A_WRONG_TYPE),
        (ValueError, OF_A_WRONG_VALUE),
        (OverflowError, TOO_LARGE),
    )
    for method, calls in methods.items()
    for arguments in calls
]


@pytest.mark.parametrize(
    ("error", "arguments"),
    [(TypeError, (0, 0, 0)), (TypeError, (0, 0, "0", 0)), (OverflowError, (2**63, 0, 0, 0))],
)
def test_runs_that_make_no_sense_are_refused(error: type[Exception], arguments: tuple[Any, ...]) -> None:
    with pytest.raises(error):
        _gather.copy_runs(*arguments)
    _gather.copy_runs(0, 0, 0, 0)


@pytest.mark.parametrize(("method", "error", "arguments"), WRONG)
def test_arguments_that_make_no_sense_are_refused_and_change_nothing(
    method: str, error: type[Exception], arguments: tuple[Any, ...]
) -> None:
    with new_queue() as queue:
        with pytest.raises(error):
            getattr(queue, method)(*arguments)
        assert queue.completed() == 0
        assert queue.submit(0, 0, 0, (), (), False) == 1
        assert queue.wait(1, DEADLINE_S)


# Tasks of other processes: half a gigabyte each, from and to memory of modules, which has no other keeper.
BUSY: Final = """
import array, os, sys, threading
from cachestream.training.batches._gather import Queue
def address(values): return values.buffer_info()[0]
block = 4 << 20
source, scratch = array.array("B", bytes(block)), array.array("B", bytes(block))
zero, base = array.array("q", [0]), array.array("q", [address(source)])
queue = Queue(int(sys.argv[1]))
columns, outs = (address(base), block) * 128, (address(scratch),) * 128
for _ in range(1000): queue.submit(address(zero), address(zero), 1, columns, outs, True)
queue.wait(1000, 0.01)
"""


def run_busy(code: str, threads: int) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BUSY + code, str(threads)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


ENDS: Final = [
    "",
    "sys.exit()",
    "threading.Thread(target=queue.wait, args=(1000, 60), daemon=True).start()",
    "import atexit; atexit.register(queue.close, 60)",
    "del queue",
]


@pytest.mark.e2e
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_interpreter_ends_in_peace_amid_the_work(threads: int, end: str, times: int) -> None:
    for _ in range(times):
        run_busy(end, threads)


CHILD: Final = """
child = os.fork()
if child == 0:
    refused = 0
    for use in (
        lambda: queue.submit(0, 0, 0, (), (), False), lambda: queue.wait(1, 60), queue.completed, lambda: queue.close(60)
    ):
        try:
            use()
        except RuntimeError as error:
            refused += "another process" in str(error)
    if DROPS:
        del queue, use
    own = Queue(2)
    number = own.submit(address(zero), address(zero), 1, columns[:2], outs[:1], True)
    assert own.wait(number, 60)
    print(refused, flush=True)
else:
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), queue.close(60))
"""


@pytest.mark.e2e
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("drops", [False, True])
def test_a_forked_child_is_refused_what_its_parent_has_and_makes_its_own(threads: int, drops: bool) -> None:
    assert run_busy(CHILD.replace("DROPS", str(drops)), threads) == "4\n0 True\n"
