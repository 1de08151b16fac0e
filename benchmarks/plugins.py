"""The plug-ins for Lance and video beside the libraries that they read with: `python -m benchmarks.plugins`.

Lance: 200,000 rows of a vector of 512 bytes and an id: read by `LanceSource`, beside a scan by pylance into arrays; then
shuffled batches of 256 rows from a cache, beside `take` of the same rows. Video: clips of 8 frames from films of 60 s in
H.264 with a keyframe every two seconds: four clips by the plug-in, beside a decode of the whole film; then epochs over
clips in a cache, beside torchcodec that decodes as many in each epoch. All from the page cache, by one thread, in turns.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import lance
import numpy as np
import pyarrow as pa
import torch
from torchcodec.decoders import VideoDecoder

import cachestream as cs
from benchmarks.measure import emit, median_ratio, scratch
from cachestream_lance import LanceSource
from cachestream_video import VideoSource

ROWS: Final = 200_000
WIDTH: Final = 128
BATCH: Final = 256
FILMS: Final = 4
FRAMES: Final = 8
TURNS: Final = 5
RNG: Final = np.random.default_rng(0)


def speed(count: int, work: Callable[[], Any]) -> float:
    begun_s = time.perf_counter()
    work()
    return count / (time.perf_counter() - begun_s)


def in_turns(
    count: int, ours: Callable[[], Any], theirs: Callable[[], Any]
) -> tuple[list[float], list[float]]:
    """How many of `count` a second, of both, after a first turn that is not counted."""
    pairs = [(speed(count, ours), speed(count, theirs)) for _ in range(TURNS + 1)][1:]
    return [mine for mine, _ in pairs], [other for _, other in pairs]


def filled(folder: Path, source: Any) -> cs.Cache:
    cache = cs.Cache(folder, "2GB", min_free=0)
    with cs.start_worker(cache, source, num_workers=1) as worker:
        worker.wait(timeout_s=120)
    return cache


def epoch_of(cache: cs.Cache, batch_size: int) -> tuple[cs.EpochLoader, Callable[[], None]]:
    loader = cs.EpochLoader(cache, batch_size)

    def epoch() -> None:
        for _ in loader:
            pass

    return loader, epoch


def measure_lance(folder: Path) -> dict[str, float]:
    values = pa.array(RNG.random(ROWS * WIDTH, np.float32))
    vectors = pa.FixedSizeListArray.from_arrays(values, WIDTH)
    table = pa.table({"id": np.arange(ROWS), "vector": vectors})
    url = str(folder / "table.lance")
    lance.write_dataset(table, url)
    source, dataset = LanceSource(url), lance.dataset(url)

    def read() -> None:
        for unit in range(source.num_units):
            for _ in source.read_rows(unit, RNG):
                pass

    def scan() -> None:
        for batch in dataset.to_batches():
            batch["vector"].flatten().to_numpy()
            batch["id"].to_numpy()

    def take() -> None:
        order = RNG.permutation(ROWS)
        for start in range(0, ROWS - BATCH + 1, BATCH):
            rows = dataset.take(order[start : start + BATCH])
            vector = rows["vector"].combine_chunks().flatten().to_numpy().reshape(BATCH, WIDTH)
            torch.from_numpy(vector.copy()), torch.from_numpy(rows["id"].to_numpy().copy())

    ours, theirs = in_turns(ROWS, read, scan)
    with filled(folder / "rows", source) as cache:
        loader, epoch = epoch_of(cache, BATCH)
        with loader:
            cached, taken = in_turns(ROWS, epoch, take)
    return {
        "lance_rows_per_s": float(np.median(ours)),
        "lance_to_scan": median_ratio(ours, theirs),
        "lance_cached_rows_per_s": float(np.median(cached)),
        "lance_cached_to_take": median_ratio(cached, taken),
    }


def measure_video(folder: Path) -> dict[str, float]:
    films = []
    for number in range(FILMS):
        films.append(folder / f"{number}.mp4")
        picture = ["-f", "lavfi", "-i", f"mandelbrot=size=320x240:rate=25:start_scale={1 + number}"]
        codec = ["-c:v", "libx264", "-preset", "ultrafast", "-g", "50", "-bf", "2", "-pix_fmt", "yuv420p"]
        command = ["ffmpeg", "-v", "error", "-y", *picture, "-t", "60", *codec, str(films[-1])]
        subprocess.run(command, check=True, timeout=300, stdin=subprocess.DEVNULL)
    source = VideoSource([str(film) for film in films], frames=FRAMES, clips=4)
    starts = np.arange(0, 1500 - FRAMES, 1500 // 16)

    def whole() -> None:
        decoder = VideoDecoder(str(films[0]), num_ffmpeg_threads=1)
        decoder.get_frames_in_range(0, len(decoder))

    def decoded() -> None:
        for film in films:
            decoder = VideoDecoder(str(film), num_ffmpeg_threads=1, seek_mode="approximate")
            for start in starts:
                decoder.get_frames_in_range(int(start), int(start) + FRAMES)

    clips, films_decoded = in_turns(1, lambda: list(source.read(0, RNG)), whole)
    every = VideoSource([str(film) for film in films], frames=FRAMES, stride=1500 // 16)
    with filled(folder / "clips", every) as cache:
        loader, epoch = epoch_of(cache, 8)
        with loader:
            cached, again = in_turns(FILMS * len(starts), epoch, decoded)
    return {
        "video_clips_to_film": median_ratio(clips, films_decoded),
        "video_cached_clips_per_s": float(np.median(cached)),
        "video_cached_to_decoding": median_ratio(cached, again),
    }


def main() -> None:
    torch.set_num_threads(1)
    with scratch() as folder:
        emit(**measure_lance(folder), **measure_video(folder))


if __name__ == "__main__":
    main()
