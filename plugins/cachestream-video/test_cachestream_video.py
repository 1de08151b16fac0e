"""Clips are those of a full decode, to the byte, and only their ranges of a file are fetched."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

import cachestream as cs
from cachestream.testing import check_source
from cachestream.transport import metering
from cachestream_video import VideoSource
from tests.support.s3 import run_s3_server

pytestmark = pytest.mark.e2e

if shutil.which("ffmpeg") is None:
    pytest.skip("FFmpeg is not installed", allow_module_level=True)

RNG: Final = np.random.Generator(np.random.Philox(key=7))
# Frames that depend on later ones, and seconds between those that depend on none.
H264: Final = (
    "-c:v",
    "libx264",
    "-preset",
    "ultrafast",
    "-g",
    "50",
    "-bf",
    "3",
    "-b_strategy",
    "0",
    "-crf",
    "20",
)
CODECS: Final = {
    "h264.mp4": H264,
    "h264.mkv": H264,
    "mpeg4.avi": ("-c:v", "mpeg4", "-g", "50"),
    "vp8.webm": ("-c:v", "libvpx", "-g", "50", "-deadline", "realtime"),
    "ntsc.mov": (*H264, "-r", "30000/1001"),
    "late.mp4": (*H264, "-output_ts_offset", "3"),
}


def encode(path: Path, *options: str, frames: int = 140, size: str = "96x64", rate: str = "25") -> Path:
    picture = f"testsrc2=size={size}:rate={rate}"
    command = ["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", picture, "-frames:v", str(frames)]
    subprocess.run([*command, *options, str(path)], check=True, timeout=120, stdin=subprocess.DEVNULL)
    return path


def full_decode(
    path: Path, height: int = 64, width: int = 96, stop: int | None = None
) -> npt.NDArray[np.uint8]:
    """All frames, or those up to `stop`, uint8 `[N, 3, H, W]`, decoded from the begin, as torchcodec converts them."""
    decoder = pytest.importorskip("torchcodec.decoders").VideoDecoder(str(path), seek_mode="exact")
    frames: npt.NDArray[np.uint8] = np.stack([frame.numpy() for frame in itertools.islice(decoder, stop)])
    assert frames.shape[1:] == (3, height, width)
    return frames


def clips_of(source: VideoSource) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    for key, sample in source.read(0, np.random.default_rng(5)):
        yield int(key.rpartition("#")[2]), sample["video"]


def fetched_while(read: Callable[[], Any]) -> int:
    seen: list[int] = []
    metering.install(seen.append)
    try:
        read()
    finally:
        metering.install(None)
    return sum(seen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("videos")
    for name, options in CODECS.items():
        encode(made / name, *options)
    return made


@pytest.mark.parametrize("name", CODECS)
def test_clips_are_frames_of_a_full_decode(folder: Path, name: str) -> None:
    frames = full_decode(folder / name)
    made: tuple[dict[str, Any], ...] = (
        {"frames": 16},
        {"frames": 3, "stride": 1, "clips": 25},
        {"frames": 5, "step": 7, "stride": 11},
    )
    for options in made:
        source, seen = VideoSource(folder / name, **options), 0
        for start, video in clips_of(source):
            expected = frames[
                start : start + options["frames"] * options.get("step", 1) : options.get("step", 1)
            ]
            assert np.array_equal(video, expected), f"{name}: {options}, clip at {start}"
            seen += 1
        span = (options["frames"] - 1) * options.get("step", 1) + 1
        stride = options.get("stride", options["frames"])
        assert seen == options.get("clips", (len(frames) - span) // stride + 1)


def test_where_the_rate_varies_clips_have_the_frames_shown_at_a_constant_rate(tmp_path: Path) -> None:
    slow = "setpts=if(lt(N\\,40)\\,N\\,40+(N-40)*3)/25/TB"
    path = encode(tmp_path / "a.mp4", "-vf", slow, "-vsync", "vfr", *H264, frames=80)
    decoder = pytest.importorskip("torchcodec.decoders").VideoDecoder(str(path), seek_mode="exact")
    for start, video in clips_of(VideoSource(path, frames=4)):
        times = (start + np.arange(4) + 0.5) / decoder.metadata.average_fps_from_header
        assert np.array_equal(video, decoder.get_frames_played_at(times.tolist()).data.numpy())


def test_only_ranges_of_a_long_file_on_a_server_are_fetched() -> None:
    with run_s3_server() as server:
        path = server.bucket("films") / "long.mp4"
        encode(path, *H264[:-1], "1", frames=1000, size="320x240")
        source = VideoSource("s3://films/long.mp4", clips=1, storage_options=server.storage_options)
        clips: list[tuple[int, npt.NDArray[np.uint8]]] = []
        nbytes = fetched_while(lambda: clips.extend(clips_of(source)))
        ((start, video),) = clips
        assert np.array_equal(video, full_decode(path, 240, 320, start + 16)[start:])
        assert nbytes < path.stat().st_size / 5, f"{nbytes} of {path.stat().st_size} bytes"
        whole = VideoSource("s3://films/long.mp4", storage_options=server.storage_options)
        nbytes = fetched_while(lambda: list(whole.read(0, RNG)))
        assert nbytes < 1.3 * path.stat().st_size


def test_the_source_is_found_by_name_and_ending_and_keeps_what_workers_rely_on(folder: Path) -> None:
    assert isinstance(cs.open_source(folder, format="video"), VideoSource)
    paths = [str(folder / name) for name in ("h264.mp4", "h264.mkv")]
    check_source(lambda: cs.open_source(paths, frames=8, clips=3, resize=32, label=len))
    samples = [sample for _, sample in cs.open_source(paths[0], frames=16, resize=(24, 32)).read(0, RNG)]
    assert [sample["video"].shape for sample in samples] == [(16, 3, 24, 32)] * (140 // 16)


def test_a_file_that_is_no_video_or_too_short_is_skipped_with_its_reason(
    folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.mp4").write_bytes(b"no video" * 100)
    (tmp_path / "b.mp4").write_bytes(b"")
    cut = (folder / "h264.mkv").read_bytes()
    (tmp_path / "c.mkv").write_bytes(cut[: len(cut) // 2])
    for name, message in (("a.mp4", "a.mp4: "), ("b.mp4", "b.mp4: ")):
        with pytest.raises(cs.SampleError, match=message):
            list(VideoSource(tmp_path / name).read(0, RNG))
    with pytest.raises(cs.SampleError, match=r"c\.mkv: .*clip at frame"):
        list(VideoSource(tmp_path / "c.mkv").read(0, RNG))
    with pytest.raises(cs.SampleError, match="a clip takes 200 frames, it has 140"):
        list(VideoSource(folder / "h264.mp4", frames=200).read(0, RNG))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": 0}, "frames=0: give a whole number, 1 or more"),
        ({"step": 1.5}, "step=1.5"),
        ({"stride": -1}, "stride=-1"),
        ({"clips": "all"}, "clips='all'"),
        ({"label": "folder"}, "label='folder': give a function"),
        ({"resize": 0}, "resize=0"),
    ],
)
def test_a_wrong_option_is_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(cs.ConfigError, match=message):
        VideoSource(folder, **options)


def test_a_server_that_is_away_is_no_fault_of_the_file(folder: Path) -> None:
    with run_s3_server() as server:
        shutil.copy(folder / "h264.mp4", server.bucket("films") / "a.mp4")
        source = VideoSource("s3://films/a.mp4", storage_options=server.storage_options)
    with pytest.raises(cs.SourceUnavailableError) as caught:
        list(source.read(0, RNG))
    assert server.secret not in str(caught.value)
