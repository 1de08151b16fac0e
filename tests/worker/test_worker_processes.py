"""Processes that the user's code starts, forks and leaves behind, and odd callers: none is left, no work is doubled."""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cachestream as cs
from cachestream import Cache
from cachestream.worker.launch import WorkerOptions
from cachestream.worker.processes import import_path, start_python
from tests.worker.sources import Numbers
from tests.worker.support import (
    DEADLINE_S,
    Processes,
    fill,
    is_running,
    kill_supervisor,
    left_files,
    only_once,
    run_python,
    sampling_pids,
    script,
    supervisor_pid,
    wait_until,
)


def children_of(pid: int) -> list[int]:
    """Its children, those too that have ended and nobody has waited for."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        found += list(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found


def leaves_orphans(sample: Any) -> Any:
    """Each sample leaves a process whose parent ends before it does, and one that leads a session of its own."""
    os.system("true & setsid true &")
    return sample


@pytest.mark.e2e
def test_orphans_that_end_are_waited_for_while_the_worker_runs(cache: Cache) -> None:
    source = Numbers(40, pause_s=0.001)
    with cs.start_worker(cache, source, num_workers=2, transform=leaves_orphans) as worker:
        assert worker.wait(DEADLINE_S)
        supervisor = supervisor_pid(cache)
        wait_until(
            lambda: all(is_running(pid) for pid in children_of(supervisor)), "no child of it is a zombie"
        )
    assert only_once(cache) == source.keys()


class Starts:
    """Starts a process that stays, tells its number in a file, and then does what `then` does."""

    def __init__(self, folder: Path, then: Callable[[Any], Any], *, session: bool = False) -> None:
        self.folder, self.then, self.session = str(folder), then, session

    def __call__(self, sample: Any) -> Any:
        process = subprocess.Popen(["sleep", "1000"], start_new_session=self.session)
        with open(os.path.join(self.folder, str(process.pid)), "x"):
            return self.then(sample)


def stays(_: Any) -> Any:
    threading.Event().wait(1000.0)


def told(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "told"
    path.mkdir()
    return path


@pytest.mark.e2e
def test_what_a_transform_has_started_goes_with_its_process(cache: Cache, folder: Path) -> None:
    worker = cs.start_worker(cache, Numbers(3), num_workers=1, transform=Starts(folder, stays))
    with worker:
        wait_until(lambda: told(folder), "the transform has started a process")
        (first,) = told(folder)
        os.kill(sampling_pids(cache)[0], signal.SIGKILL)
        wait_until(lambda: not is_running(first), "it goes with the killed process")
        wait_until(lambda: len(told(folder)) > 1, "another process takes its place")
    wait_until(lambda: not any(map(is_running, told(folder))), "the others go with theirs")


@pytest.mark.e2e
def test_what_a_transform_has_started_goes_with_a_supervisor_that_is_killed(
    cache: Cache, folder: Path, processes: Processes
) -> None:
    worker = cs.start_worker(cache, Numbers(3), num_workers=1, transform=Starts(folder, stays))
    wait_until(lambda: told(folder), "the transform has started a process")
    kill_supervisor(cache, processes, worker)
    wait_until(lambda: not any(map(is_running, told(folder))), "they go")
    wait_until(lambda: cache.recover() == 0 and not left_files(cache), "killed threads have let go of files")


SESSIONS = """
import os, signal, subprocess, sys
from cachestream.worker import processes

deaf = "trap '' TERM; echo; while :; do sleep 1; done"
starts = f"({deaf}) & read line; exit"
led = subprocess.Popen(["sh", "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
alive = subprocess.Popen(["sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE, start_new_session=True)
other = subprocess.Popen(["sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
for process in (led, alive, other):
    process.stdout.readline()
led.stdin.close()
led.wait()
processes.EndedSessions([led.pid, alive.pid]).wait(50)
print(led.stdout.read(), alive.poll(), other.poll())
alive.kill()
other.kill()
"""


@pytest.mark.e2e
def test_a_session_ends_after_its_leader_with_who_is_deaf_and_nobody_else_does() -> None:
    assert run_python(SESSIONS).split() == ["b''", "None", "None"]


class StartsTwo:
    """Starts a process, and one in a session of its own."""

    def __init__(self, folder: Path, session: Path) -> None:
        self.stays, self.leads = Starts(folder, dict), Starts(session, dict, session=True)

    def __call__(self, sample: Any) -> Any:
        return self.leads(self.stays(sample))


@pytest.mark.e2e
def test_what_a_transform_has_started_goes_at_an_end_in_order_too_unless_it_has_a_session_of_its_own(
    cache: Cache, folder: Path, tmp_path: Path
) -> None:
    session = tmp_path / "told-session"
    session.mkdir()
    fill(cache, Numbers(3), transform=StartsTwo(folder, session))
    assert len(told(session)) == len(told(folder)) == 3
    wait_until(lambda: not any(map(is_running, told(folder))), "none is left")
    assert all(map(is_running, told(session))), "a daemon is meant to stay"
    for pid in told(session):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, told(session))), "none of these either")


def forks(sample: Any) -> Any:
    """The copy of this process returns, too, or ends as a script does."""
    if not os.fork() and sample["x"][0] % 2:
        sys.exit(0)
    return sample


@dataclass(frozen=True)
class ForksInRead(Numbers):
    """Each sample forks a process; one that is asked for the next sample, too, makes the file `asked`."""

    asked: str = ""

    def read(self, unit: int, rng: Any) -> Any:
        for item in super().read(unit, rng):
            is_copy = not os.fork()
            yield item
            if is_copy:
                Path(self.asked).touch()


@pytest.mark.e2e
@pytest.mark.parametrize("where", ["transform", "source"])
def test_a_copy_that_comes_back_from_a_transform_or_a_source_does_not_do_its_work_too(
    cache: Cache, processes: Processes, tmp_path: Path, where: str
) -> None:
    asked = tmp_path / "asked"
    source = Numbers(30) if where == "transform" else ForksInRead(30, asked=str(asked))
    fill(cache, source, transform=forks if where == "transform" else None)
    assert only_once(cache) == source.keys()
    assert not cache.status().failures
    processes.wait_until_gone()
    assert not asked.exists(), "a copy ends before it reads on"


def semaphores(prefix: str) -> list[str]:
    """The semaphores of multiprocessing in /dev/shm whose names contain `prefix`."""
    folder = "/dev/shm"
    return [name for name in os.listdir(folder) if prefix in name] if os.path.isdir(folder) else []


class Computes:
    """Has processes of its own compute, which it starts at first use and never ends."""

    def __init__(self, method: str, prefix: str) -> None:
        self.method, self.prefix = method, prefix

    def __call__(self, sample: Any) -> Any:
        pools = self.__dict__.setdefault("pools", [])
        if not pools:
            vars(multiprocessing.current_process())["_config"]["semprefix"] = f"/{self.prefix}"
            context = multiprocessing.get_context(self.method)
            pools.append(concurrent.futures.ProcessPoolExecutor(2, mp_context=context))
        assert self.method == "fork" or not os.path.isdir("/dev/shm") or semaphores(self.prefix)
        return {**sample, "sum": pools[0].submit(math.fsum, sample["x"].tolist()).result()}


def pools(sample: Any) -> Any:
    """A pool for each sample, which asks its processes to end by SIGTERM, before they have had time to begin even."""
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return {**sample, "sum": sum(pool.map(int, sample["x"][:2].tolist()))}


def interrupts(sample: Any) -> Any:
    process = subprocess.Popen(["sleep", "1000"])
    process.send_signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT
    return pools(sample)


@pytest.mark.e2e
def test_a_transform_may_end_what_it_has_started_or_forked_by_a_signal(
    cache: Cache, processes: Processes
) -> None:
    source = Numbers(60)
    with cs.start_worker(cache, source, num_workers=2, transform=interrupts) as worker:
        assert worker.wait(DEADLINE_S)
        status = worker.status()
        assert (status.failures, status.worker and status.worker.restarts) == ((), 0)
    assert only_once(cache) == source.keys()
    processes.wait_until_gone()


@pytest.mark.e2e
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_transform_may_have_other_processes_compute_and_they_go_with_its_own(
    cache: Cache, processes: Processes, method: str
) -> None:
    source, prefix = Numbers(10), f"mp{secrets.token_hex(6)}"
    with cs.start_worker(cache, source, num_workers=1, transform=Computes(method, prefix)) as worker:
        assert worker.wait(DEADLINE_S)
        assert not cache.status().failures
    assert only_once(cache) == source.keys()
    processes.wait_until_gone()
    assert not semaphores(prefix), "what spawned processes share has a name, and somebody removes it"


CALLER = """
import os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
import cachestream as cs
from tests.worker.sources import Numbers
from tests.worker.support import supervisor_pid

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
[os.close(fd) for fd in (0, 1, 2)]
os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone"); sys.path.insert(0, "")
sys.path += [Path("/somewhere"), b"/elsewhere"]
cache = cs.Cache(sys.argv[1])
source = Numbers(30, pause_s=0.01)
with cs.start_worker(cache, source, num_workers=2) as worker:
    assert worker.wait(120)
    assert cache.num_samples == 30
    assert not cache.status().failures
    os.kill(supervisor_pid(cache), signal.SIGTERM)
    while worker.is_alive():
        time.sleep(0.02)
said = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
os.write(said, b"done")
"""


@pytest.mark.e2e
def test_a_worker_does_its_work_whatever_the_caller_is(cache: Cache, tmp_path: Path) -> None:
    with script(tmp_path / "caller.py", CALLER, cache.path, str(tmp_path / "said")) as caller:
        caller.process.wait(timeout=DEADLINE_S)
    assert (tmp_path / "said").exists()


REAPS = """
import os, subprocess, sys, time
from cachestream.linux import adopt_orphans
from cachestream.worker.processes import reap_orphans

assert adopt_orphans()
ours = subprocess.Popen(["sh", "-c", "exit 3"])
another = subprocess.Popen(["sh", "-c", "exit 4"], start_new_session=True)
reads = "exec 3<&0; cat <&3 >&2 & echo $!"  # until its input ends, and that is after its parent has
between = subprocess.Popen(["sh", "-c", reads], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
orphan = int(between.stdout.readline())
between.wait()
between.stdin.close()
for pid in (ours.pid, another.pid, orphan):
    while b") Z" not in open(f"/proc/{pid}/stat", "rb").read():
        time.sleep(0.01)
reap_orphans([another.pid])
print(os.path.exists(f"/proc/{orphan}"), ours.wait(), another.wait())
"""


@pytest.mark.e2e
def test_a_supervisor_whose_caller_has_died_ends_without_a_word(cache: Cache) -> None:
    job = WorkerOptions(num_workers=1).job(cache, Numbers(10))
    answer, to_answer = os.pipe()
    supervisor = start_python(
        "cachestream.worker.supervisor",
        import_path(),
        str(to_answer),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(to_answer,),
        start_new_session=True,
    )
    for fd in (answer, to_answer):  # as a caller that is killed
        os.close(fd)
    _, said = supervisor.communicate(pickle.dumps(job), timeout=60)
    assert (said, supervisor.returncode) == (b"", 0)
    wait_until(lambda: not cache.has_worker(), "nothing of the worker is left")


@pytest.mark.e2e
def test_orphans_are_waited_for_and_children_of_others_are_not() -> None:
    assert run_python(REAPS).split() == ["False", "3", "4"]


def test_what_cannot_be_opened_leaves_no_process(cache: Cache, processes: Processes) -> None:
    with pytest.raises(cs.SourceError, match="no such file"):
        cs.start_worker(cache, f"{cache.path}/nothing-here/")
    processes.wait_until_gone()


@pytest.mark.e2e
def test_neither_the_supervisor_nor_a_sampling_process_loads_a_driver_that_the_source_does_not_bring() -> (
    None
):
    modules = "cachestream.worker.supervisor, cachestream.worker.sampling.sampler"
    code = f"import sys, {modules}; print({{'fsspec', 'torch'}} & set(sys.modules))"
    assert run_python(code).strip() == "set()"


def test_only_what_python_imports_from_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/first", Path("/passed/over"), b"/too"])
    assert import_path() == (str(tmp_path), "/first")


@pytest.mark.skipif(
    not os.path.exists("/proc/self/autogroup"), reason="sessions are not scheduled as groups here"
)
def test_the_sessions_of_sampling_processes_come_after_that_of_the_trainer(cache: Cache) -> None:
    def nice_values(pids: Iterable[int | str]) -> list[str]:
        return [Path(f"/proc/{pid}/autogroup").read_text().rpartition(" ")[2].strip() for pid in pids]

    before = nice_values(["self"])  # an empty word where this session has no group of its own
    with cs.start_worker(cache, Numbers(4000, pause_s=0.01), num_workers=3):
        wait_until(
            lambda: nice_values(sampling_pids(cache)) == ["5"] * 3,
            "all of them are lowered, a tenth of a second apart",
        )
        assert nice_values(["self"]) == before
