# What _gather.c makes, where setup.py could build it; its docstrings say what the functions do.
from typing import final

def gather(
    shards: int, rows: int, count: int, columns: tuple[int, ...], outs: tuple[int, ...], around: bool, /
) -> None: ...

@final
class Queue:
    def __init__(self, threads: int = 1) -> None: ...
    def submit(
        self,
        shards: int,
        rows: int,
        count: int,
        columns: tuple[int, ...],
        outs: tuple[int, ...],
        around: bool,
        /,
    ) -> int: ...
    def wait(self, number: int, timeout_s: float, /) -> bool: ...
    def completed(self) -> int: ...
    def submitted(self) -> int: ...
    def close(self, timeout_s: float, /) -> bool: ...
