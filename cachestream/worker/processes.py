"""Processes on Linux: how a background process is started, named, tied to its parent, and ended with all of its group."""

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

# The child imports from where its parent does, and leaves the cores to the trainer's own threads.
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
_MOST_TURNS = 200  # on a machine that is busy, a process takes long to die
_ended: dict[int, float] = {}  # leaders of groups that were to end, and since when


def import_path() -> tuple[str, ...]:
    """Where this process imports from, as another one can: what is no text, as a Path, Python passes over."""
    here, entries = _current_folder(), list[object](sys.path)
    return tuple(path or here for path in entries if isinstance(path, str) and (path or here))


def _current_folder() -> str:
    """Empty where it has been removed: nothing can be imported from there."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def start_python(
    module: str, sys_path: tuple[str, ...], *arguments: str, **options: Any
) -> subprocess.Popen[bytes]:
    """Start `main()` of `module` in a Python of its own: no fork of our state, no main guard needed."""
    command = [sys.executable, "-c", _BOOT.format(module=module), json.dumps(sys_path), *arguments]
    # In a folder that is gone Python 3.13.0 cannot import its own modules.
    return subprocess.Popen(command, close_fds=True, cwd=None if _current_folder() else "/", **options)


def begin_clean() -> None:
    """Not as the caller may be: deaf to its children's deaths and to signals, or without standard files.

    A signal that is ignored or blocked stays so in what a process starts.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    have_standard_files()


def have_standard_files() -> None:
    """Open those of standard input and outputs that are closed: the first file opened would take their place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(fd, True)  # a Python started without standard error has no sys.stderr
    os.close(fd)


def let_go_of_terminal() -> None:
    """The worker outlives the terminal it was started from, and must not write to it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Get the signal `number` when the parent ends, however it does."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> bool:
    """Become the parent of descendants whose own parent ends; False where the system does not have that."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Be called `name` by `ps` and `top`, which show 15 characters of it."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def end_group(pid: int) -> None:
    """Ask all in the group that the child `pid` leads to end; `look_after_orphans` kills those that have not a moment later.

    To be called before it is waited for: a number that is free again may be another's. Not killed at once, because
    multiprocessing has a process that then removes what others of the group have left in /dev/shm.
    """
    _ended[pid] = time.monotonic()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGTERM)


def end_group_of_dead(pid: int) -> None:
    """`end_group`, if the child `pid` has ended."""
    with suppress(ChildProcessError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            end_group(pid)


def end_if_forked(pid: int) -> None:
    """End a copy of process `pid` that the user's code has forked and let return from it: it would do its work too."""
    if os.getpid() != pid:
        os.write(
            2, b"a process that a transform or a source had forked came back from it; end it with os._exit\n"
        )
        os._exit(1)


def look_after_orphans(but: Collection[int]) -> int:
    """Wait for the adopted that have ended: nobody else does. Those of `but` have somebody who does.

    Children of our own session are not adopted, where each process that may leave orphans has a session of its own.
    Kills those of groups that were to end a moment ago; returns how many of them there still are.
    """
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_bytes()
    except OSError:
        return 0  # a kernel that does not tell
    ours, left = os.getsid(0), []
    for pid in set(map(int, children.split())) - set(but):
        with suppress(ProcessLookupError, ChildProcessError):
            session = os.getsid(pid)
            if session != ours and os.waitpid(pid, os.WNOHANG) == (0, 0) and session in _ended:
                left.append(session)
                if time.monotonic() - _ended[session] >= _GRACE_S:
                    os.kill(pid, signal.SIGKILL)
    for session in _ended.keys() - set(left):
        if time.monotonic() - _ended[session] >= _GRACE_S:
            del _ended[session]
    return len(left)


def is_there(pid: int) -> bool:
    """Whether the process `pid` is there, which may not lead a group yet, or anybody in the group that it led."""
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
    """Whether somebody has stopped the process (SIGSTOP, a debugger)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")


def end_orphans() -> None:
    """Wait until none is left of the groups that were to end, which takes the moment that they have, and little more."""
    deadline_s = time.monotonic() + 2 * _GRACE_S
    while look_after_orphans(()) and time.monotonic() < deadline_s:
        time.sleep(_TICK_S)


def end_sessions(leaders: Collection[int]) -> None:
    """Ask all in the sessions that `leaders` led to end, and kill those that have not a moment later.

    Leaders themselves are waited for: they are about to end. While one is there, its number may be another's by now,
    and after that it cannot be: a session keeps it as long as anybody is in it.
    """
    asked: dict[int, int] = {}
    for turn in range(_MOST_TURNS):  # not by the clock: this process may be stopped meanwhile
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
