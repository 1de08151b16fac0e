"""A Ctrl-C at any step of a use of the cache leaves nothing locked for other threads and processes.

The interrupt is a real SIGINT, raised after each call and at each beginning of a function in turn: these are the
places where CPython looks for signals. The tracebacks are kept, as a notebook keeps the last one.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Final

import pytest

import cachestream as cs

# In a process of its own, because an interrupt may well leave a descriptor open.
_INTERRUPTED: Final = """
import signal, subprocess, sys, threading
import cachestream as cs

root, other_program = sys.argv[1:]
cache = cs.Cache(root)
other = subprocess.Popen(
    [sys.executable, "-c", other_program, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)

def use():
    {use}

def held_elsewhere():
    other.stdin.write("?\\n")
    other.stdin.flush()
    return other.stdout.readline().strip()

def steps(interrupted=0):
    done = 0

    def look(frame, event, argument):
        nonlocal done
        if event in ("call", "c_return"):
            done += 1
            if done == interrupted:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    sys.setprofile(look)
    try:
        use()
    except BaseException as error:
        kept.append(error)
    finally:
        sys.setprofile(None)
    return done

kept = []
use()  # what is made at the first use is there
total = steps()
assert total > 20 and not kept, (total, kept)
for step in range(1, total, 1 + total // 100):
    steps(step)
    assert held_elsewhere() == "[]", (step, total, held_elsewhere())
    done = threading.Event()
    threading.Thread(target=lambda: (cache.num_samples, done.set()), daemon=True).start()
    assert done.wait(30), f"another thread waits after step {{step}} of {{total}}"
assert any(isinstance(error, KeyboardInterrupt) for error in kept)
"""
# Says for each line of input which locks of the cache this process cannot take at once.
_OTHER: Final = """
import fcntl, glob, sqlite3, sys
root = sys.argv[1]
catalogue = sqlite3.connect(root + "/catalogue.sqlite", timeout=0.1, isolation_level=None)
for _ in sys.stdin:
    held = []
    try:
        catalogue.execute("BEGIN EXCLUSIVE")
        catalogue.execute("ROLLBACK")
    except sqlite3.Error as error:
        held.append(f"catalogue: {error}")
    for path in glob.glob(root + "/**/*lock*", recursive=True):
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                held.append(path)
    print(held, flush=True)
"""
_USES: Final = {
    "num_samples": "cache.num_samples",
    "repr": "repr(cache)",
    "setting": "cache.min_free = 1",
    "wait": "cache.wait(1)",
    "status": "cache.status()",
    "evict": "cache.evict('9MB')",
    "snapshot": "cache.snapshot().close()",
    "verify": "cache.verify()",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("interrupts") / "cache"
    with cs.Cache(path, "10MB", min_free=0) as cache:
        source = cs.open_source([{"x": number} for number in range(40)])
        with cs.start_worker(cache, source, num_workers=1, shard_size="1KB") as worker:
            worker.wait(60)
    return str(path)


@pytest.mark.parametrize("use", _USES.values(), ids=_USES.keys())
def test_an_interrupt_at_any_step_leaves_no_lock_behind(root: str, use: str) -> None:
    program = _INTERRUPTED.format(use=use)
    command = [sys.executable, "-W", "ignore", "-c", program, root, _OTHER]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert not ended.returncode, ended.stderr[-3000:]
