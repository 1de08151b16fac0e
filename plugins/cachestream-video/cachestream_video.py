"""A source for cachestream: clips of a few frames from video files, read by ranges with torchcodec."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cachestream.config import whole_number
from cachestream.errors import ConfigError, SampleError
from cachestream.listing.file_list import FileList, Url
from cachestream.sources.base import Problems, check_unit
from cachestream.sources.decode.images import ImageOptions, Size
from cachestream.sources.user_code import fingerprint_of, guard_user_code
from cachestream.transport.file_objects import open_file

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


class VideoSource:
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
        self._frames, self._step = _at_least_one("frames", frames), _at_least_one("step", step)
        self._stride = _at_least_one("stride", self._frames * self._step if stride is None else stride)
        self._clips = None if clips is None else _at_least_one("clips", clips)
        if label is not None and not callable(label):
            raise ConfigError(f"label={label!r}: give a function of the path, or None")
        self._label, self._images = label, ImageOptions(resize, crop)
        _torchcodec()
        self._files = FileList(
            urls, storage_options, owner="VideoSource", extensions=extensions, preferred=ENDINGS
        )
        self.num_units = len(self._files)
        options = [f"clip={self._frames},{self._step},{self._stride},{self._clips}", *self._images.identity]
        options += [f"label={fingerprint_of(label)}"] if label is not None else []
        self.fingerprint = "video:" + "|".join((*self._files.identity, *options))
        self.first_names, self.listing_digest = self._files.names, self._files.digest

    def read(self, unit: int, rng: np.random.Generator) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the clips of a file, in the order of their first frames. Raises as `Source.read`."""
        check_unit(self, unit, self.num_units)
        key, where = self._files.key(unit), self._files.where(unit)
        read_bytes = _FILE_READ_BYTES if self._clips is None else _CLIP_READ_BYTES
        label = {}
        if self._label is not None:
            with guard_user_code(f"label({key!r})"):
                label = {"label": self._label(key)}
        problems = Problems(where)
        files = self._files
        with open_file(files.remote, files.path(unit), files.where(unit), read_bytes) as file:
            decoder = _Decoder(file)
            for start in self._starts(decoder, where, rng):
                try:
                    video, seconds = decoder.clip(start + self._step * np.arange(self._frames))
                except (RuntimeError, IndexError, ValueError) as error:
                    file.raw.raise_error()  # type: ignore[attr-defined]
                    problems.add(f"clip at frame {start}: {str(error)[:200]}")
                    continue
                if self._images.identity:
                    video = np.stack([self._images.apply(frame) for frame in video])
                yield f"{key}#{start}", {"video": video, "seconds": seconds, **label}
        problems.raise_any()

    def _starts(self, decoder: _Decoder, where: str, rng: np.random.Generator) -> Iterator[int]:
        """Yield the first frames of the clips, in ascending order."""
        span = (self._frames - 1) * self._step + 1
        count = (decoder.num_frames - span) // self._stride + 1
        if count < 1:
            raise SampleError(f"{where}: a clip takes {span} frames, it has {decoder.num_frames}")
        drawn: Iterable[int] = range(count)
        if self._clips is not None and self._clips < count:
            drawn = np.sort(rng.choice(count, self._clips, replace=False)).tolist()
        for number in drawn:
            yield number * self._stride

    def __repr__(self) -> str:
        return f"<VideoSource {self._files.shown}, {self.num_units:,} files, clips of {self._frames} frames>"


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


def _at_least_one(name: str, value: Any) -> int:
    number = whole_number(value)
    if number is None or number < 1:
        raise ConfigError(f"{name}={value!r}: give a whole number, 1 or more")
    return number
