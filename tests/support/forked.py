"""Commands and scripts in processes of their own, forked from a server that has loaded what takes long to load.

A new interpreter that loads torch takes two seconds, a fork a few milliseconds. What a fork cannot show (imports, the
environment of the interpreter, its outputs when they are closed) needs a new one: `subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any, Final

from tests.training.scripts.ports import free_port

__all__ = ["fork_process", "fork_ranks", "fork_script", "run_forked", "start_server"]

PRELOADED: Final = [
    "torch",
    "torch.distributed",
    "torch._dynamo",  # which every optimizer loads at its first step
    "cachestream.cli.app",
    "typer._adapters",  # which every command loads when it is called
    "cachestream.training.loader",
]
CONTEXT: Final = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the server with the environment of now; it ends with this process."""
    CONTEXT.set_forkserver_preload([*PRELOADED, __name__])
    forkserver.ensure_running()


def run_forked(
    main: Callable[[], object],
    arguments: Sequence[object] = (),
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Call `main`, a function of a module, as the main function of a process with `arguments`.

    The environment is that of now with that of `environment`, the input is empty.
    """
    command = ["main", *map(str, arguments)]
    everything = {**os.environ, **(environment or {})}
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        outputs = (f"{folder}/stdout", f"{folder}/stderr")
        folder_of_it = str(cwd or os.getcwd())
        process = CONTEXT.Process(target=_run, args=(main, command, folder_of_it, everything, outputs))
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
        texts = [Path(path).read_text(encoding="utf-8", errors="surrogateescape") for path in outputs]
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout_s, *texts)
    return subprocess.CompletedProcess(command, code, *texts)


def fork_process(
    main: Callable[[], object],
    arguments: Sequence[object] = (),
    *,
    environment: Mapping[str, str],
    output: Path,
) -> Process:
    """Start `main` as in `run_forked`, in the current folder; both outputs go to files beside `output`."""
    everything = {**os.environ, **environment}
    outputs = (f"{output}.stdout", f"{output}.stderr")
    command = ["main", *map(str, arguments)]
    process = CONTEXT.Process(target=_run, args=(main, command, os.getcwd(), everything, outputs))
    process.start()
    return process


def fork_script(
    script: Path,
    arguments: Sequence[object] = (),
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Run `script` as a process in which each warning is an error."""
    given = {**(environment or {}), "FORKED_SCRIPT": str(script)}
    return run_forked(_run_script, arguments, cwd=cwd, environment=given, timeout_s=timeout_s)


def fork_ranks(
    script: Path,
    *arguments: Sequence[object],
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float,
) -> str:
    """Run `script` as a job with a rank for each of `arguments`, as torchrun would; what all of them print.

    A rank under torchrun loads torch anew. A rank that fails raises AssertionError.
    """
    size = str(len(arguments))
    job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1", **(environment or {})}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def run(rank: int) -> str:
        mine = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        done = fork_script(script, arguments[rank], cwd=cwd, environment=mine, timeout_s=timeout_s)
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    with ThreadPoolExecutor() as threads:
        return "".join(threads.map(run, range(len(arguments))))


def _run_script() -> None:
    path = os.environ.pop("FORKED_SCRIPT")
    sys.argv[0], sys.path[0] = path, os.path.dirname(os.path.abspath(path))
    if threads := os.environ.get("OMP_NUM_THREADS"):  # torch has read it before
        sys.modules["torch"].set_num_threads(int(threads))
    warnings.simplefilter("error")
    runpy.run_path(path, run_name="__main__")


def _run(
    main: Callable[[], Any],
    command: list[str],
    cwd: str,
    environment: dict[str, str],
    outputs: tuple[str, str],
) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in enumerate(outputs, 1):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(fd, number)
        os.close(fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.argv = command
    sys.path.insert(0, cwd)
    try:
        main()
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001  a process's main
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # processes of multiprocessing leave them out
