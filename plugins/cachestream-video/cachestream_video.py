"""A source for cachestream: clips of a few frames from video files, read by ranges with torchcodec."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.sources.api import (
    ConfigError,
    File,
    FileList,
    FilesSource,
    Format,
    ImageOptions,
    Item,
    Part,
    SampleError,
    Size,
    Skipped,
    Url,
    check_count,
    fingerprint_of,
    guard_user_code,
)

ENDINGS: Final = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
_CLIP_READ_BYTES: Final = 256 << 10  # of one request, where clips are drawn
_FILE_READ_BYTES: Final = 1 << 20  # where a file is read from its begin to its end


def _torchcodec() -> Any:
    """Return the module torchcodec.decoders. Raises ConfigError without it, or without FFmpeg."""
    try:
        return importlib.import_module("torchcodec.decoders")
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            "VideoSource needs torchcodec (pip install torchcodec) and FFmpeg's shared libraries, 4 to 8 "
            f"(Debian: apt-get install ffmpeg): {type(error).__name__}: {reason}"
        ) from error


class VideoFormat(Format):
    """Videos: see `VideoSource` for the options."""

    name = "video"
    endings = ENDINGS

    def __init__(
        self,
        frames: int,
        step: int,
        stride: int | None,
        clips: int | None,
        label: Callable[[str], Any] | None,
        images: ImageOptions,
        extensions: str | Iterable[str] | None,
    ) -> None:
        self._frames, self._step = check_count("frames", frames), check_count("step", step)
        self._stride = check_count("stride", self._frames * self._step if stride is None else stride)
        self._clips = None if clips is None else check_count("clips", clips)
        if label is not None and not callable(label):
            raise ConfigError(f"label={label!r}: give a function of the path, or None")
        self._label, self.images, self._extensions = label, images, extensions
        _torchcodec()
        self.identity = [f"clip={self._frames},{self._step},{self._stride},{self._clips}"]
        self.identity += [f"label={fingerprint_of(label)}"] if label is not None else []

    def find(self, urls: Any, storage_options: Mapping[str, Any] | None, owner: str) -> FileList:
        return FileList(
            urls, storage_options, owner=owner, extensions=self._extensions, preferred=self.endings
        )

    def read(self, file: File, part: Part, rng: np.random.Generator) -> Iterator[Item]:
        """Yield the clips of a file, in the order of their first frames."""
        read_bytes = _FILE_READ_BYTES if self._clips is None else _CLIP_READ_BYTES
        label = {}
        if self._label is not None:
            with guard_user_code(f"label({file.key!r})"):
                label = {"label": self._label(file.key)}
        with file.opened(read_bytes) as opened:
            decoder = _Decoder(opened)
            for start in self._starts(decoder, rng):
                try:
                    video, seconds = decoder.clip(start + self._step * np.arange(self._frames))
                except (RuntimeError, IndexError, ValueError) as error:
                    opened.raw.raise_error()  # type: ignore[attr-defined]
                    yield Skipped(f"clip at frame {start}: {str(error)[:200]}")
                    continue
                if self.images.identity:
                    video = np.stack([self.images.apply(frame) for frame in video])
                yield start, {"video": video, "seconds": seconds, **label}

    def _starts(self, decoder: _Decoder, rng: np.random.Generator) -> Iterator[int]:
        """Yield the first frames of the clips, in ascending order."""
        span = (self._frames - 1) * self._step + 1
        count = (decoder.num_frames - span) // self._stride + 1
        if count < 1:
            raise SampleError(f"a clip takes {span} frames, it has {decoder.num_frames}")
        drawn: Iterable[int] = range(count)
        if self._clips is not None and self._clips < count:
            drawn = np.sort(rng.choice(count, self._clips, replace=False)).tolist()
        for number in drawn:
            yield number * self._stride


class VideoSource(FilesSource):
    """Clips of videos; a unit is a file.

    urls: a URL, a folder, a `{000..127}` range, a wildcard, or a list of these.

    A sample is a dict of "video", uint8 `[frames, 3, H, W]` RGB, "seconds", the time of the first frame
    from the begin of the file, and "label", if one is given: `label(key)` of the path below the common root
    of all files. The key of a sample is "path#frame", with the number of its first frame.

    A clip has `frames` frames, one of every `step`. Clips begin at every `stride`-th frame (`frames * step`
    unless given). clips: the number to draw at random of each file in each pass, all of them different; only
    their ranges of the file are fetched. None: all clips, in order.

    Frames are taken at a constant rate, the average one of the file: in a file of a constant rate, frame i of
    a clip is frame `start + i * step` of a full decode, to the byte. Where the rate varies, it is the frame
    shown at that time; such a file is scanned once a pass, for its own index does not tell.

    resize, crop: the size of the frames, see `cachestream.ImageOptions`.

    Raises ConfigError for options that are none, and where torchcodec or FFmpeg is missing; otherwise as
    `FileSource`. A file that is no video, or shorter than a clip, is skipped and counted.
    """

    def __init__(
        self,
        urls: Url | Iterable[Url],
        *,
        frames: int = 16,
        step: int = 1,
        stride: int | None = None,
        clips: int | None = None,
        label: Callable[[str], Any] | None = None,
        resize: Size | None = None,
        crop: Size | None = None,
        extensions: str | Iterable[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        images = ImageOptions(resize, crop)
        format = VideoFormat(frames, step, stride, clips, label, images, extensions)  # noqa: A001
        super().__init__(format, urls, storage_options)


class _Decoder:
    """The frames of one file, found by its own index; by a scan of the whole file if that misleads.

    Raises RuntimeError, IndexError or ValueError, as torchcodec does, for what cannot be decoded.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self._is_scanned = file, False
        self._decoder = _torchcodec().VideoDecoder(file, seek_mode="approximate")
        metadata = self._decoder.metadata
        if not metadata.average_fps or metadata.num_frames is None:
            raise ValueError("the file does not tell its frame rate or its length")
        self._fps, self._begin = float(metadata.average_fps), float(metadata.begin_stream_seconds)
        self.num_frames = int(metadata.num_frames)

    def clip(self, numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], float]:
        """Return frames by number, `[frames, 3, H, W]`, and the time of the first one in seconds."""
        nominal = self._begin + numbers / self._fps
        # In the middle of each frame: times are rounded in the file.
        times = (nominal + 0.5 / self._fps).tolist()
        found = self._decoder.get_frames_played_at(times)
        begins = found.pts_seconds.numpy()
        if not self._is_scanned and (abs(begins - nominal) >= 0.5 / self._fps).any():  # of a varying rate
            self._file.seek(0)
            self._decoder = _torchcodec().VideoDecoder(self._file, seek_mode="exact")
            self._is_scanned = True
            found = self._decoder.get_frames_played_at(times)
        return found.data.numpy(), float(found.pts_seconds[0])
