"""Background processes: started, tied to their parents, and ended with all that they have started."""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final

from cachestream import tracing
from cachestream.errors import CacheFullError, CacheLockedError
from cachestream.storage.os_errors import CatalogueDamagedError, DiskFailedError

# Only `sys` is imported before the path is set, as "-c" has put the working directory before all else. The
# child leaves the cores to the threads of the trainer.
_BOOTSTRAP: Final = (
    "import sys; sys.path[:] = sys.argv[2 : 2 + int(sys.argv[1])]; del sys.argv[1 : 2 + len(sys.path)]; import os; "
    "[os.environ.setdefault(n, '1') for n in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OPENBLAS_NUM_THREADS')]; "
    "from {module} import main; main()"
)
_GRACE_S: Final = 1.0
_CHECK_S: Final = 0.05
_MOST_CHECKS: Final = 200  # a process takes long to die on a busy machine
EXIT_FATAL: Final = 3  # another process would fail, too
EXIT_RESTART: Final = 4  # another process is to go on at once
EXIT_LATER: Final = 5  # another process is to go on once the disk or the catalogue may be free
# Errors whose cause may be gone soon.
_MAY_PASS: Final[tuple[type[Exception], ...]] = (
    CacheFullError,
    CacheLockedError,
    CatalogueDamagedError,
    DiskFailedError,
)
STOP_S: Final = 3.0


def import_path() -> tuple[str, ...]:
    """The entries of `sys.path` that another process can use, without those that are no str."""
    here, entries = _current_folder(), list[object](sys.path)
    return tuple(path or here for path in entries if isinstance(path, str) and (path or here))


def _standard_library_first(entries: tuple[str, ...]) -> list[str]:
    """The entries of an import path: the standard library, then the others in their order.

    A new Python has loaded nothing yet. In the order of its parent, it would take a `types.py` of the user's
    for the module of the standard library that the parent has loaded long ago. What the user's own code
    imports is found in the order of the parent, see `job.load_shared`.
    """
    standard = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}

    def is_other(entry: str) -> bool:
        folder = os.path.realpath(entry)
        return folder not in standard and not folder.endswith("lib-dynload")

    return sorted(entries, key=is_other)


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
    path = _standard_library_first(sys_path)
    command = [sys.executable, "-c", _BOOTSTRAP.format(module=module), str(len(path)), *path, *arguments]
    # In a folder that has been removed, Python 3.13.0 cannot import its own modules.
    return subprocess.Popen(command, close_fds=True, cwd=None if _current_folder() else "/", **options)


def reset_inherited_state() -> None:
    """Undo what a process may inherit: ignored or blocked signals, closed standard files."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    have_standard_files()


def have_standard_files() -> None:
    """Open /dev/null in place of closed standard files: the next file opened would take the number of one."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(fd, True)  # a Python that is started without standard error has no sys.stderr
    os.close(fd)


def detach_from_terminal() -> None:
    """Redirect the standard files to /dev/null: the worker outlives the terminal of its caller."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)


def end_if_forked(pid: int) -> None:
    """End this process if it is a fork of `pid` that has returned from the user's code.

    Such a fork would do the work a second time.
    """
    if os.getpid() != pid:
        os.write(
            2, b"a process that a transform or a source had forked came back from it; end it with os._exit\n"
        )
        os._exit(1)


def reap_orphans(others: Collection[int | None]) -> None:
    """Reap adopted processes that have ended, as no other code does.

    Children in `others` are reaped elsewhere. Children in our own session are not adopted: each process that
    may leave orphans has a session of its own.
    """
    try:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_bytes()
    except OSError:
        return  # not all kernels have this file
    ours = os.getsid(0)
    for pid in set(map(int, children.split())) - set(others):
        with suppress(ProcessLookupError, ChildProcessError):
            if os.getsid(pid) != ours:
                os.waitpid(pid, os.WNOHANG)


class EndedSessions:
    """The sessions of processes that have ended; their other members are ended, too.

    A member gets SIGTERM, and SIGKILL a moment later: the resource tracker of multiprocessing first removes
    what a session has left in /dev/shm. A session is left alone while a process has the id of its leader, as
    that may be an unrelated process. Once no process has it, the id is not reused while the session has a
    member.
    """

    def __init__(self, leaders: Collection[int] = ()) -> None:
        self._leaders = set(leaders)
        self._asked_s: dict[int, float] = {}  # process id to the time of its SIGTERM

    def add(self, leader: int) -> None:
        self._leaders.add(leader)

    def end_members(self) -> bool:
        """Ask the members of the sessions to end, or kill those that were asked before; False without any."""
        if not self._leaders:
            return False
        try:
            sessions, now_s = _sessions(), time.monotonic()
        except OSError:  # too few descriptors: another call will tell
            return True
        for pid, session in sessions.items():
            if session in self._leaders and session not in sessions:
                is_new = pid not in self._asked_s
                asked_s = self._asked_s.setdefault(pid, now_s)
                with suppress(ProcessLookupError, PermissionError):
                    if is_new or now_s - asked_s >= _GRACE_S:
                        os.kill(pid, signal.SIGTERM if is_new else signal.SIGKILL)
        self._leaders &= sessions.keys() | set(sessions.values())
        self._asked_s = {pid: asked_s for pid, asked_s in self._asked_s.items() if pid in sessions}
        return bool(self._leaders)

    def wait(self, checks: int = _MOST_CHECKS) -> None:
        """Wait until the leaders and all members are gone, or for `checks` times 50 ms.

        Counts checks, not time: this process may be stopped meanwhile.
        """
        while checks > 0 and self.end_members():
            checks -= 1
            time.sleep(_CHECK_S)


def _sessions() -> dict[int, int]:
    """The session of each process that has not ended; raises OSError if one cannot be read."""
    found = {}
    for name in os.listdir("/proc"):
        with suppress(ProcessLookupError, FileNotFoundError, ValueError):  # no process, or it has just ended
            stat = Path(f"/proc/{int(name)}/stat").read_bytes()
            state, _parent, _group, session = stat.rpartition(b")")[2].split()[:4]
            if state not in (b"Z", b"X"):
                found[int(name)] = int(session)
    return found


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Send one value through a pipe."""
    pickle.dump(value, stream)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """Receive one value; raises EOFError if the other side is gone."""
    try:
        return pickle.load(stream)  # noqa: S301  sent by our own parent or child through a pipe
    except pickle.UnpicklingError as error:  # only a part of it came
        raise EOFError("the pipe was closed") from error


def heed_signals(stop: threading.Event) -> None:
    """Set `stop` at SIGTERM, and leave Ctrl-C to the supervisor; what the user's code forks handles neither
    so.
    """
    faulthandler.enable()
    # SIG_IGN would outlast an exec.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    os.register_at_fork(
        before=functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, [signal.SIGTERM]),
        after_in_child=_restore_signals,
    )


def _restore_signals() -> None:
    """Restore the default signal handlers in a process that the user's code has forked, and unblock SIGTERM.

    A multiprocessing pool waits for ever for a process that ignores SIGTERM. The signal is blocked during the
    fork: our handler would take it, in a process that has nothing to stop.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def exit_code(
    work: Callable[[], None],
    fatal: type[Exception],
    restart: tuple[type[Exception], ...] = (),
    later: tuple[type[Exception], ...] = (),
) -> int:
    """Do `work`; return the exit code for the supervisor, after printing the error if there is one.

    An error of the class `fatal` would come again in another process. After one of the classes `restart`,
    another process is to go on at once; after one of the classes `later`, in a moment.
    """
    try:
        work()
    except restart:
        return EXIT_RESTART
    except _MAY_PASS + later as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_LATER
    except BaseException as error:  # noqa: BLE001  a process's main: the supervisor ships the traceback home
        traceback.print_exc()
        return EXIT_FATAL if isinstance(error, fatal) else 1
    return 0


def exit_now(code: int) -> None:
    """End the process without waiting for its threads, which may hang in a dead connection."""
    tracing.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_soon(stop: threading.Event) -> None:
    """Set `stop`, and end this process a moment later, whatever its threads do: its supervisor has ended."""
    stop.set()
    time.sleep(STOP_S)  # as a rule the process, and this thread with it, ends meanwhile
    os._exit(0)
