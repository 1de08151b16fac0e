"""Time to accuracy over a slow remote: `python -m benchmarks.peers.accuracy [--seeds 3] [--seconds 60] [--only TEXT,…] [--save]`.

The same small network, from the same weights, on the same views (the demo's: which of 135 places does one show?) from
the same S3 server behind the same limit, for the same time, once with each loader: held-out accuracy against
wall-clock. The trainer could take about ten times what the remote gives, and the remote holds more than twice what can be
fetched in the budget. Loaders take turns, a process for each run. `--draw FILE.jsonl` takes what was measured before.

With `--speeds 0.1,0.3,1,2` (of what the trainer takes) the remote is as fast as each of these in turn: accuracy and
samples trained on against its speed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.measure import scratch
from benchmarks.page import matrix
from benchmarks.peers.accuracy.entries import ENTRIES, Entry
from benchmarks.peers.accuracy.show import Run, draw, draw_sweep, figures_of, figures_of_sweep
from benchmarks.peers.accuracy.train import Outcome, Settings
from benchmarks.peers.accuracy.views import SHARD_SAMPLES
from benchmarks.record import ROOT, save
from cachestream.demo.data import PLACES, make_remote
from tests.support.proxy import FaultyProxy, run_proxy
from tests.support.s3 import S3Server, run_s3_server

TRAINER_BYTES_PER_S: Final = 10_000_000  # about what the trainer could take
SPEED: Final = 0.1  # of the remote, of that
VIEW_BYTES: Final = 4362  # on average
FETCHABLE: Final = 2.2  # the views are so many times what comes in the budget
MOST_VIEWS: Final = 48_000
HELD_OUT: Final = 10 * PLACES
SPARE_S: Final = 300.0  # for imports and for working the accuracy out, also where others use the machine
OUTPUT: Final = Path("benchmarks/output")
PLOT: Final = ROOT / "docs" / "time-to-accuracy.png"
SWEEP_PLOT: Final = ROOT / "docs" / "remote-speeds.png"


def _outcome(command: list[str], timeout_s: float, folder: Path) -> Outcome | None:
    """The outcome of a run, once it has ended or is too late; None if there is none."""
    told, log = folder / "outcome.json", folder / "log"
    with told.open("w") as out, log.open("w") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors, start_new_session=True)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"not over after {timeout_s:.0f} s", file=sys.stderr)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the loaders' own processes, too
        process.wait()
    try:
        return Outcome(**json.loads(told.read_text().splitlines()[-1]))
    except (IndexError, ValueError):
        print(log.read_text()[-2000:], file=sys.stderr)
        return None


def _run(
    entry: Entry,
    seed: int,
    seconds: float,
    speed: float,
    server: S3Server,
    proxy: FaultyProxy,
    views: Path,
) -> Run | None:
    shards = len(list(server.bucket("tars").iterdir()))
    with scratch() as folder:
        settings = Settings(
            seed=seed,
            seconds=seconds,
            option=entry.option,
            endpoint_url=f"http://127.0.0.1:{proxy.port}",
            key=server.key,
            secret=server.secret,
            shards=shards,
            folder=str(folder),
            views=str(views),
        )
        begun_s = time.monotonic()
        command = [*_MODULE, "train", entry.module, json.dumps(asdict(settings))]
        outcome = _outcome(command, seconds + SPARE_S, folder)
    if outcome is None:
        print(f"failed: {entry.title}, seed {seed}", file=sys.stderr, flush=True)
        return None
    fetched = sum(nbytes for at_s, nbytes in list(proxy.sent) if at_s >= begun_s)
    print(
        f"{entry.title}, speed {speed:g}, seed {seed}: first batch {outcome.first_batch_s:.1f} s, {outcome.samples} samples, "
        f"waiting {outcome.waited:.0%}, {fetched / 1e6:.0f} MB, accuracy {outcome.accuracy[-1]:.3f}",
        file=sys.stderr,
        flush=True,
    )
    return Run(entry.title, seed, fetched, outcome, speed)


_MODULE: Final = [sys.executable, "-m", "benchmarks.peers.accuracy.train"]


def measure(entries: Sequence[Entry], seeds: int, seconds: float, speeds: Sequence[float]) -> Iterator[Run]:
    """Every run that came to its end, the loaders in turn for each speed and seed."""
    with scratch() as folder, run_s3_server(folder / "s3", fresh=False) as server:
        fetchable = int(FETCHABLE * seconds * max(speeds) * TRAINER_BYTES_PER_S / VIEW_BYTES)
        samples = min(fetchable, MOST_VIEWS) // SHARD_SAMPLES * SHARD_SAMPLES
        print(f"writing {samples} views", file=sys.stderr, flush=True)
        make_remote(folder / "views", max(samples, PLACES), HELD_OUT)
        for module in dict.fromkeys(["tars", *(entry.prepared_by for entry in entries)]):
            prepare = [*_MODULE, "prepare", module, str(folder / "views"), str(server.root)]
            subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
        for speed, seed in itertools.product(speeds, range(seeds)):
            with run_proxy(server.port, bytes_per_s=speed * TRAINER_BYTES_PER_S) as proxy:
                for entry in entries:
                    run = _run(entry, seed, seconds, speed, server, proxy, folder / "views")
                    if run is not None:
                        yield run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.accuracy", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="the budget of a run")
    parser.add_argument("--only", default="", help="parts of the names of loaders, separated by commas")
    parser.add_argument("--speeds", default="", help="those of the remote, of what the trainer takes")
    parser.add_argument("--draw", type=Path, nargs="+", help="measure nothing; draw the runs in these files")
    parser.add_argument(
        "--save", action="store_true", help="keep the figures in benchmarks/results, the plot in docs"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT / "accuracy.png")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.draw:
        runs = [Run.from_json(line) for path in options.draw for line in path.read_text().splitlines()]
    else:
        parts = options.only.split(",")
        entries = [entry for entry in ENTRIES if any(part in entry.title for part in parts)]
        runs = []
        with options.output.with_suffix(".jsonl").open("w") as kept:
            speeds = [float(speed) for speed in filter(None, options.speeds.split(","))]
            for run in measure(entries, options.seeds, options.seconds, speeds or [SPEED]):
                runs.append(run)
                kept.write(run.to_json() + "\n")
                kept.flush()
    is_sweep = len({run.speed for run in runs}) > 1
    (draw_sweep if is_sweep else draw)(runs, options.output)
    print(f"wrote {options.output}")
    figures = (figures_of_sweep if is_sweep else figures_of)(runs)
    print("\n".join(matrix(figures)))
    if options.save:
        name, plot = ("speeds", SWEEP_PLOT) if is_sweep else ("accuracy", PLOT)
        shutil.copyfile(options.output, plot)
        print(f"wrote {save(name, figures)} and {plot}")


if __name__ == "__main__":
    main()
