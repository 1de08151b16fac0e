"""Processes on Linux: started, named, tied to their parents, and ended with their groups."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

# The child has the `sys.path` of its parent, and leaves the cores to the threads of the trainer.
_BOOT: Final = (
    "import os, sys, json; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "[os.environ.setdefault(n, '1') for n in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS')]; "
    "from {module} import main; main()"
)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_GRACE_S: Final = 1.0
_TICK_S: Final = 0.01
_TURN_S: Final = 0.05
_GRACE_TURNS: Final = 20
_MOST_TURNS: Final = 200  # a process takes long to die on a busy machine
_asked_to_end_s: dict[int, float] = {}  # leaders of groups that were asked to end, and the time of that


def import_path() -> tuple[str, ...]:
    """The entries of `sys.path` that another process can use.

    As Python does, leaves out entries that are not str.
    """
    here, entries = _current_folder(), list[object](sys.path)
    return tuple(path or here for path in entries if isinstance(path, str) and (path or here))


def _current_folder() -> str:
    """The working directory; "" if it has been removed, so that nothing can be imported from there."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def start_python(
    module: str, sys_path: tuple[str, ...], *arguments: str, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `main()` of `module` in a new Python: without inherited state, without a main guard."""
    command = [sys.executable, "-c", _BOOT.format(module=module), json.dumps(sys_path), *arguments]
    # In a folder that has been removed, Python 3.13.0 cannot import its own modules.
    return subprocess.Popen(command, close_fds=True, cwd=None if _current_folder() else "/", **options)


def begin_clean() -> None:
    """Undo what a process may inherit: ignored or blocked signals, closed standard files."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    have_standard_files()


def have_standard_files() -> None:
    """Open /dev/null in place of closed standard files: the next file opened would take their number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(fd, True)  # a Python that is started without standard error has no sys.stderr
    os.close(fd)


def detach_from_terminal() -> None:
    """Redirect the standard files to /dev/null: the worker outlives the terminal of its caller."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Get the signal `number` when the parent ends, in whatever way."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends (a subreaper).

    False if the system cannot do that.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, the first 15 characters of it."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def end_group(pid: int) -> None:
    """Send SIGTERM to the group that the child `pid` leads.

    `reap_orphans` kills what is left of it a moment later.

    To be called before the child is waited for: after that its id may belong to another process. The group is
    not killed at once, because the resource tracker of multiprocessing first removes what the group has left
    in /dev/shm.
    """
    _asked_to_end_s[pid] = time.monotonic()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)


def end_group_of_dead(pid: int) -> None:
    """Call `end_group` if the child `pid` has ended."""
    with suppress(ChildProcessError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            end_group(pid)


def end_if_forked(pid: int) -> None:
    """End this process if it is a fork of `pid` that has returned from the user's code.

    It would do the work a second time.
    """
    if os.getpid() != pid:
        os.write(
            2, b"a process that a transform or a source had forked came back from it; end it with os._exit\n"
        )
        os._exit(1)


def reap_orphans(others: Collection[int]) -> int:
    """Wait for adopted processes that have ended, as no other code does.

    Children in `others` are waited for elsewhere. Children in our own session are not adopted: each process
    that may leave orphans has a session of its own. Kills processes of groups that were asked to end a moment
    ago, and returns how many of these are left.
    """
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_bytes()
    except OSError:
        return 0  # not all kernels have this file
    ours, left = os.getsid(0), []
    for pid in set(map(int, children.split())) - set(others):
        with suppress(ProcessLookupError, ChildProcessError):
            session = os.getsid(pid)
            if session != ours and os.waitpid(pid, os.WNOHANG) == (0, 0) and session in _asked_to_end_s:
                left.append(session)
                if time.monotonic() - _asked_to_end_s[session] >= _GRACE_S:
                    os.kill(pid, signal.SIGKILL)
    for session in _asked_to_end_s.keys() - set(left):
        if time.monotonic() - _asked_to_end_s[session] >= _GRACE_S:
            del _asked_to_end_s[session]
    return len(left)


def is_there(pid: int) -> bool:
    """True if there is a process `pid`, or any process in the group that it led.

    A new process may not lead its group yet.
    """
    for look in (os.kill, os.killpg):
        try:
            look(pid, 0)
        except ProcessLookupError:
            continue
        except PermissionError:
            pass
        return True
    return False


def is_stopped(pid: int) -> bool:
    """True if the process is stopped (by SIGSTOP or a debugger)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")


def end_orphans() -> None:
    """Wait until no process is left of the groups that were asked to end, at most twice their grace time."""
    deadline_s = time.monotonic() + 2 * _GRACE_S
    while reap_orphans(()) and time.monotonic() < deadline_s:
        time.sleep(_TICK_S)


def end_sessions(leaders: Collection[int]) -> None:
    """End all processes in the sessions that `leaders` led, by SIGTERM and a moment later by SIGKILL.

    The leaders themselves are about to end, and are only waited for. While a process with the id of a leader
    exists, it may be an unrelated one; once there is none, the id cannot be reused as long as its session has
    a member.
    """
    asked: dict[int, int] = {}
    for turn in range(_MOST_TURNS):  # counts turns, not time: this process may be stopped meanwhile
        sessions = _sessions()
        if sessions.keys().isdisjoint(leaders) and not set(sessions.values()) & set(leaders):
            return
        for pid, session in sessions.items():
            if session in leaders and session not in sessions:
                waited = turn - asked.setdefault(pid, turn)
                with suppress(ProcessLookupError, PermissionError):
                    if not waited or waited >= _GRACE_TURNS:
                        os.kill(pid, signal.SIGKILL if waited else signal.SIGTERM)
        time.sleep(_TURN_S)


def _sessions() -> dict[int, int]:
    """The session of each process that has not ended."""
    found = {}
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError):  # no process, or it has just ended
            stat = Path(f"/proc/{int(name)}/stat").read_bytes()
            state, _parent, _group, session = stat.rpartition(b")")[2].split()[:4]
            if state not in (b"Z", b"X"):
                found[int(name)] = int(session)
    return found


def _prctl(option: int, value: object) -> bool:
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(option, value) == 0)
    return False
