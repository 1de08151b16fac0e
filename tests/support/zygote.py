"""The main script of a process that has loaded what supervisors load, and forks one for each request.

A new Python takes a second of a processor to load that. Its import path comes after the number of its socket.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import os
import pickle
import signal
import socket
import sys

CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
MODULE = "cachestream.worker.supervisor"
LOADED = (MODULE, "cachestream.worker.sampling.sampler", "cachestream.formats.files")
# What the modules of tests load, from which the processes take the sources and transforms of tests.
OF_TESTS = (
    "torch",
    "torch.utils.data",
    "pytest",
    "PIL.Image",
    "fsspec.implementations.local",
    "safetensors.numpy",
)
SIZE = 1 << 20


def fork_sibling() -> int:
    """Fork a child of this process's parent, which waits for it; 0 in that child."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = ctypes.PyDLL(None).syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def become(
    fds: list[int], path: list[str], arguments: list[str], cwd: str, variables: dict[str, str]
) -> None:
    """Be a new supervisor: its input, its errors and its answer are `fds`; does not return."""
    read, errors, answer = fds
    os.setsid()
    for fd, number in ((read, 0), (errors, 2)):
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    sys.path[:] = path
    sys.argv[:] = ["-c", str(answer), *arguments]
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115  of the process
    importlib.import_module(MODULE).main()


def serve(requests: socket.socket) -> None:
    """Answer each request by the process id of a new supervisor, until the other side is closed."""
    for module in (*LOADED, *OF_TESTS):
        importlib.import_module(module)
    while True:
        data, ancillary, _, _ = requests.recvmsg(SIZE, socket.CMSG_SPACE(12))
        if not data:
            return
        fds = array.array("i", ancillary[0][2]).tolist()
        pid = fork_sibling()
        if not pid:
            code = 1
            try:
                requests.close()
                become(fds, *pickle.loads(data))
                code = 0
            finally:
                os._exit(code)
        for fd in fds:
            os.close(fd)
        requests.send(str(pid).encode())


if __name__ == "__main__":
    sys.path[:] = sys.argv[2:]
    serve(socket.socket(fileno=int(sys.argv[1])))
