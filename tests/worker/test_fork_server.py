"""Processes are forked from one that has loaded what they need, are children of who asked, and share no fate with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import cachestream as cs
from cachestream import Cache
from tests.support.s3 import S3Server
from tests.worker.sources import Numbers
from tests.worker.support import (
    DEADLINE_S,
    ROOT,
    Processes,
    only_once,
    run_python,
    sampling_pids,
    supervisor_pid,
    wait_until,
)

# A process that is what the supervisor is: it starts a module of its own, `told`, which tells what it finds.
SUPERVISOR = """
import os, signal, subprocess, sys, time
import numpy.random  # as a driver may do
from cachestream.worker.child_process import ForkServer

server = ForkServer()
job = os.memfd_create("job")
os.write(job, b"the job")
{body}
"""
TOLD = """
import os, sys

def main():
    said = sys.stdin.buffer.readline()
    print(os.getppid(), os.pread(JOB, 100, 0).decode(), said.decode().strip(), sorted(map(int, os.listdir("/proc/self/fd"))), flush=True)
    print("on stderr", file=sys.stderr, flush=True)
    if said == b"stay\\n":
        sys.stdin.buffer.read()
    os._exit(7)
"""


def run(tmp_path: Path, body: str) -> list[str]:
    """The output of a supervisor that runs `body`."""
    (tmp_path / "told.py").write_text(TOLD.replace("JOB", "int(os.environ['JOB'])"))
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    return run_python(SUPERVISOR.format(body=body), PYTHONPATH=path, JOB="50").splitlines()


START = """
os.dup2(job, 50)
forked = server.start("told", 50)
forked.stdin.write({said!r})
forked.stdin.flush()
"""
DRAWN = """
import os, numpy

def main():
    print(numpy.random.random(), flush=True)
    os._exit(0)
"""


@pytest.mark.e2e
def test_a_forked_process_has_its_pipes_its_job_and_nothing_else_and_is_waited_for_and_outlives_its_server(
    tmp_path: Path,
) -> None:
    (tmp_path / "drawn.py").write_text(DRAWN)
    stays = START.format(said=b"stay\n") + "forked.stdout.readline()\n"
    body = (
        START.format(said=b"hello\n")
        + "print(os.getpid(), forked.wait(60), forked.stdout.read().decode(), end='')\n"
        + "for _ in range(3): print(server.start('drawn', job).stdout.read().decode().strip())\n"
        + stays
        + "try:\n    forked.wait(0.2)\nexcept subprocess.TimeoutExpired:\n    print('late')\n"
        "forked.kill()\n"
        "print(forked.wait(60))\n" + stays + "os.kill(server._pid, signal.SIGKILL)\n"
        "print([server.start('told', 50) for _ in range(2)])\n"
        "print(forked.poll())\n"
        "forked.stdin.close()\n"
        "print(forked.wait(60))"
    )
    first, second, *others = run(tmp_path, body)
    pid, code, parent, *rest = first.split(" ", 3)
    assert code == "7"
    assert parent == pid, "it is a child of who asked for it"
    assert rest == [f"the job hello {[0, 1, 2, 3, 50]}"], "and 3 is the folder that it lists"
    assert second == "on stderr"
    drawn = others[:3]
    assert len(set(map(float, drawn))) == 3, "the global generator of numpy differs between processes"
    assert others[3:5] == ["late", str(-signal.SIGKILL)], "it stays, and its end by a signal is told"
    assert others[5:] == ["[None, None]", "None", "7"], "of a killed server it stays, and no other comes"


@pytest.mark.e2e
def test_a_fork_server_that_does_not_answer_is_ended_at_the_deadline(tmp_path: Path) -> None:
    body = (
        "server._socket.settimeout(0.5)\n"  # not 10 s
        "os.kill(server._pid, signal.SIGSTOP)\n"
        "print([server.start('told', job) for _ in range(2)])\n"
        "try:\n    os.kill(server._pid, 0)\nexcept ProcessLookupError:\n    print('gone')"
    )
    assert run(tmp_path, body) == ["[None, None]", "gone"]


@pytest.mark.e2e
def test_a_fork_server_that_the_system_refuses_a_process_is_gone(tmp_path: Path) -> None:
    body = START.format(said=b"hello\n") + (
        "import resource\n"
        "resource.prlimit(server._pid, resource.RLIMIT_NOFILE, (8, 8))\n"  # os.pipe fails, as fork would
        "print(server.start('told', job))"
    )
    assert run(tmp_path, body) == ["None"]


@pytest.mark.e2e
def test_a_refusal_is_told_at_once_while_other_processes_run(tmp_path: Path) -> None:
    body = (
        START.format(said=b"stay\n")
        + (
            "forked.stdout.readline()\n"
            "import resource\n"
            "resource.prlimit(server._pid, resource.RLIMIT_NOFILE, (8, 8))\n"
            "begun_s = time.monotonic()\n"
            "print(server.start('told', job), time.monotonic() - begun_s < 5)\n"  # and not after its deadline of 10 s
            "forked.stdin.close()\n"
            "print(forked.wait(60))"
        )
    )
    assert run(tmp_path, body) == ["None True", "7"]


@pytest.mark.e2e
def test_a_worker_goes_on_when_its_fork_server_is_killed(cache: Cache, processes: Processes) -> None:
    source = Numbers(150, pause_s=0.1)
    with cs.start_worker(cache, source, num_workers=2) as worker:
        cache.wait(1, DEADLINE_S)
        pids = sampling_pids(cache)
        (server,) = processes.called("cs-forkserver")
        os.kill(server, signal.SIGKILL)
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: pids[0] not in sampling_pids(cache), "another takes its place")
        assert worker.wait(DEADLINE_S)
    assert only_once(cache) == source.keys()


def test_what_cannot_be_opened_leaves_no_process(cache: Cache, processes: Processes) -> None:
    with pytest.raises(cs.SourceError, match="no such file"):
        cs.start_worker(cache, f"{cache.path}/nothing-here/")
    processes.wait_until_gone()


@pytest.mark.e2e
def test_a_fork_server_has_the_driver_of_the_source_and_the_supervisor_has_not(
    cache: Cache, processes: Processes, s3_server: S3Server, s3_bucket: Path
) -> None:
    for number in range(5):
        (s3_bucket / f"{number}.txt").write_text(str(number))
    source = cs.open_source(f"s3://{s3_bucket.name}/", storage_options=s3_server.storage_options)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        assert worker.wait(DEADLINE_S)
        (server,) = processes.called("cs-forkserver")
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (server, supervisor_pid(cache))]
    assert ["aiohttp" in one for one in maps] == [True, False]


@pytest.mark.e2e
def test_neither_the_supervisor_nor_a_sampling_process_loads_a_driver_that_the_source_does_not_bring() -> (
    None
):
    modules = "cachestream.worker.supervisor, cachestream.worker.sampling.sampler"
    code = f"import sys, {modules}; print({{'fsspec', 'torch'}} & set(sys.modules))"
    assert run_python(code).strip() == "set()"
