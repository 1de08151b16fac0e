"""Processes that a supervisor forks: what they have, what they print, and how they end."""

from __future__ import annotations

import math

import pytest

from cachestream.worker.child_process import START_DEADLINE_S, ChildProcess
from tests.worker.support import run_python

# What the supervisor is: a process of one thread with a guardian, whose children do what `run` does.
SUPERVISOR = """
import logging, os, signal, socket, subprocess, sys, threading, time
import numpy.random  # as a driver may do
from cachestream.worker.channel import SupervisorLink
from cachestream.worker.child_process import ChildProcess, Forks, Guardian

logging.getLogger("cachestream.worker").addHandler(logging.NullHandler())
secret = os.open("/dev/null", os.O_RDONLY)
forks = Forks(Guardian(open(os.devnull, "wb")), lambda: os.close(secret))

def loop(process, seconds=60.0):
    "The messages of a process until its end, and its exit code."
    heard, ends_s = [], time.monotonic() + seconds
    while time.monotonic() < ends_s:
        for key, _ in forks.selector.select(0.05):
            if key.fileobj is process.channel:
                heard += process.receive()
            else:
                process.read_output()
        if (code := process.reap()) is not None:
            return heard, code
    return heard, None

def start(run, name="a process"):
    process = ChildProcess(name, forks, run)
    process.start(time.monotonic())
    return process
"""


def run(body: str) -> list[str]:
    """The lines that a supervisor prints that does `body`."""
    return run_python(SUPERVISOR + body + "\nforks.guardian.close()\n").splitlines()


TELLS = """
def tells(end):
    link = SupervisorLink(end, lambda *_: None, lambda: None)
    files = [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in map(str, range(40)) if os.path.exists(f"/proc/self/fd/{fd}")]
    link.tell("is", os.getppid(), os.getsid(0) == os.getpid(), sorted(files), numpy.random.random())
    print("on stdout", flush=True)
    print("on stderr", file=sys.stderr, flush=True)
    return 7

others = [start(lambda end: end.recv(1) and 0, f"other {number}") for number in range(2)]
drawn = []
for _ in range(3):
    process = start(tells)
    heard, code = loop(process)
    ((_, _, (parent, leads, files, number)),) = heard
    drawn.append(number)
print(parent == os.getpid(), leads, code, files)
print(repr(process.last_output), len(set(drawn)))
for other in others:
    other.end()
print([other.running for other in others], process.is_over)
"""


@pytest.mark.e2e
def test_a_process_has_its_socket_its_output_a_session_and_a_generator_of_its_own_and_nothing_else() -> None:
    first, second, third = run(TELLS)
    # Its socket, and standard files: nothing for input, and its output.
    assert first == "True True 7 ['/dev/null', 'pipe', 'pipe', 'socket']"
    assert second == "'on stdout\\non stderr\\n' 3"
    assert third == "[False, False] True"


@pytest.mark.e2e
def test_an_error_of_a_process_is_in_its_last_output_and_a_signal_is_told() -> None:
    body = """
def fails(end):
    raise ValueError("torn at s3://me:secret@host/x")
process = start(fails)
print(loop(process)[1], process.last_output.strip().splitlines()[-1])
process = start(lambda end: end.recv(1) and 0)
process.kill()
print(loop(process)[1])
"""
    assert run(body) == ["1 ValueError: torn at s3://host/x", "-9"]


@pytest.mark.e2e
def test_a_line_that_never_ends_comes_in_pieces() -> None:
    body = """
def prints(end):
    os.write(1, b"one\\n")
    for _ in range(100):
        os.write(1, b"\\rprogress" * 1000)
    os.write(1, b"\\nthe last")
    return 0
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
log = logging.getLogger("cachestream.worker")
log.addHandler(Lines())
log.setLevel(logging.INFO)
process = start(prints)
print(loop(process)[1], lines[0], lines[-1], max(map(len, lines)) < 10_000, len(process.last_output) < 10_000)
"""
    assert run(body) == ["0 a process: one a process: the last True True"]


@pytest.mark.e2e
def test_a_process_can_be_started_again_and_what_it_has_started_ends_with_it() -> None:
    body = """
def starts(end):
    print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
    return 0
process = start(starts)
seen = []
for _ in range(2):
    code = loop(process)[1]
    seen.append(int(process.last_output))
    process.start(time.monotonic())
loop(process)
def runs(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
ends_s = time.monotonic() + 30
while any(map(runs, seen)) and time.monotonic() < ends_s:
    forks.ended.end_members()
    time.sleep(0.05)
print(len(set(seen)), [runs(pid) for pid in seen])
"""
    assert run(body) == ["2 [False, False]"]


def test_a_process_is_silent_if_it_has_sent_nothing_for_long_while_it_could() -> None:
    process = ChildProcess.__new__(ChildProcess)
    process.pid, process.life_s, process.started_s = 1, None, 100.0
    never = -math.inf
    assert not process.is_silent(100.0 + START_DEADLINE_S, never, 1.0), "it begins"
    assert process.is_silent(101.0 + START_DEADLINE_S, never, 1.0)
    assert not process.is_silent(101.0 + START_DEADLINE_S, 150.0, 1.0), "all were stopped"
    process.life_s = 200.0
    assert not process.is_silent(204.0, never, 1.0), "a busy machine"
    assert process.is_silent(206.0, never, 1.0)
    assert not process.is_silent(206.0, never, 30.0)
    assert process.is_silent(231.0, never, 30.0)
    assert not process.is_silent(231.0, 210.0, 30.0)
    process.pid = None
    assert not process.is_silent(999.0, never, 1.0)


REFUSES = """
from cachestream import ConfigError
from cachestream.worker.processes import read_frame
from cachestream.worker.supervisor import _refuse
process = start(lambda end: time.sleep(600) or 0)
read, write = os.pipe()
_refuse(forks, os.fdopen(write, "wb"), ConfigError("no such order"))
print(process.running, repr(read_frame(os.fdopen(read, "rb"))))
"""


def test_a_start_that_is_refused_leaves_no_process_for_which_the_guardian_would_wait() -> None:
    assert run(REFUSES) == ["False ConfigError('no such order')"]
