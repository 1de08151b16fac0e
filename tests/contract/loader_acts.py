"""Acts of training: a job of some ranks makes a loader, goes on from a state, takes batches, and ends.

Ranks beyond one are processes under `torch.distributed` (gloo), started once for all acts and other tasks. A sample is known by its number.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

import cachestream as cs

__all__ = ["OPTIONS", "Act", "Played", "Ranks", "play", "samples_of", "write_remote"]

PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Act:
    """A job from its start to its end. `steps` None: to the end of the epoch; `options`: a name in `OPTIONS`.

    `leave`: the epoch is left after `steps`, and the first batch of the next one is taken.
    """

    cache: Path
    options: str
    batch_size: int
    steps: int | None = None
    ranks: int = 1
    state: dict[str, Any] | None = None
    drop_last: bool = True
    leave: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Played:
    """The outcome for one rank: the numbers of each batch, and the state after them."""

    batches: list[list[int]]
    state: dict[str, Any]
    left: int  # of the epoch's batches, before the first one here
    epoch: int


def samples_of(path: Path, **options: Any) -> list[int]:
    """The numbers of the samples that a snapshot holds, in its order."""
    with cs.Cache(path) as cache:
        if not cache.num_samples:
            return []
        with cache.snapshot(**options) as dataset:
            return [int(number) for number in dataset[:]["number"]] if len(dataset) else []


def write_remote(folder: Path, numbers: range) -> None:
    """One file a sample: `x` float32 [5] full of the number, `tokens` int64 [1 to 7], `number`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        tokens = np.full(1 + number % 7, number)
        np.savez(folder / f"{number:04d}.npz", x=np.full(5, number, np.float32), tokens=tokens, number=number)


# --- options, which other processes know by their names


class Backwards(torch.utils.data.Sampler[int]):
    """Every second sample, from the last to the first."""

    def __init__(self, dataset: Any) -> None:
        self.indices = list(range(len(dataset) - 1, -1, -2))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def not_third(columns: Any) -> Any:
    """Samples whose number is no multiple of three."""
    return np.asarray(columns["number"]) % 3 != 0


def doubled(batch: Any) -> Any:
    """A transform that a test can see in `x`."""
    return batch | {"x": batch["x"] * 2}


WEIGHTS: Final = {f"{number:04d}.npz": 3.0 if number % 2 else 1.0 for number in range(1000)}
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "shuffled": {},
    "in order": {"shuffle": False},
    "sampler": {"sampler": Backwards},
    "fewer": {"epoch_size": 20},
    "more": {"epoch_size": 150},
    "where": {"where": not_third},
    "columns": {"columns": ["number"]},
    "held out": {"split": "train", "holdout": 0.25},
    "locality": {"locality": 16},
    "ragged": {"ragged": "padded"},
    "transform": {"batch_transform": doubled},
    "weights": {"weights": True},
    "mixture": {"mixture": {"a": 0.5, "b": 0.5}},
    "tokens": {"max_tokens": {"tokens": 16}},
}


# --- playing


def play(act: Act) -> list[Played]:
    """The outcome of an act of one rank, in this process."""
    return [_play(act)]


def _play(act: Act) -> Played:
    options = {"drop_last": act.drop_last, "timeout_s": PATIENCE_S, **OPTIONS[act.options], **act.more}
    with (
        cs.Cache(act.cache) as cache,
        cs.EpochLoader(cache, act.batch_size, **options) as loader,
    ):
        if act.state is not None:
            loader.load_state_dict(act.state)
        iteration = iter(loader)
        batches: list[list[int]] = []
        left = len(loader) - loader.batches_done
        while act.steps is None or len(batches) < act.steps:
            batch = next(iteration, None)
            if batch is None:
                break
            _check(batch, act.options)
            batches.append(batch["number"].tolist())
        if act.leave:
            next(iter(loader))
        return Played(batches, loader.state_dict(), left, loader.epoch)


def _check(batch: Any, options: str) -> None:
    """Every field of every sample is that of its number."""
    numbers = batch["number"]
    if options == "columns":
        assert list(batch) == ["number"]
        return
    factor = 2 if options == "transform" else 1
    assert torch.equal(batch["x"], factor * numbers[:, None].expand(-1, 5).to(torch.float32))
    if options == "ragged":
        assert batch["tokens"].lengths.tolist() == [1 + n % 7 for n in numbers.tolist()]
    else:
        assert [t.tolist() for t in batch["tokens"]] == [[n] * (1 + n % 7) for n in numbers.tolist()]


# --- several ranks


def _work(pipe: Connection) -> None:
    """A rank's process: does each (task, arguments, rank, size, port) it is told, until it is told None."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while (told := pipe.recv()) is not None:
        task, arguments, rank, size, port = told
        address = f"tcp://127.0.0.1:{port}"
        try:
            dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
            try:
                pipe.send(task(*arguments))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            pipe.send(error)


class Ranks:
    """A job of `size` processes that do tasks, one after the other; the answers are those of all ranks, in order.

    All of them make the same loaders, as ranks do: a task is done by all of them, or in the test's own process.
    """

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # torch is imported once
        self._pipes, self._processes = [], []
        for _ in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results of `task(*arguments)`, or the exceptions; of a rank that has died, EOFError."""
        size = len(self._pipes)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank, pipe in enumerate(self._pipes):
            pipe.send((task, arguments, rank, size, port))
        outcomes: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(2 * PATIENCE_S), f"rank {rank} does not answer: {task} of {arguments}"
            try:
                outcomes.append(pipe.recv())
            except EOFError as error:
                outcomes.append(error)
        return outcomes

    def play(self, act: Act) -> list[Played]:
        outcomes = self.run(_play, act)
        for rank, outcome in enumerate(outcomes):
            if not isinstance(outcome, Played):
                raise RuntimeError(f"rank {rank} of {act}") from outcome  # noqa: TRY004 - it is the rank's own error
        return outcomes

    def kill(self) -> None:
        """End all processes that still run, in any state."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            try:
                pipe.send(None)
            except BrokenPipeError:
                pass
            process.join(30)
            if process.exitcode is not None:
                process.close()  # and with it the pipes to the server that forked it
            pipe.close()
