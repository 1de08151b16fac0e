"""Decoding of encoded images when a batch is made, for caches that keep the bytes of JPEGs and not their
pixels.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from cachestream.errors import ConfigError, SampleError
from cachestream.sources.decode.images import ImageOptions, Size, decode_image
from cachestream.sources.decode.values import decode_with


def decode_images(
    size: Size | None = None,
    *,
    crop: Size | None = None,
    device: torch.device | str | int | None = None,
    field: str = "image",
) -> Callable[[Any], Any]:
    """Return a `batch_transform` that decodes the images of a batch, in threads, one for each core.

    The bytes of a JPEG are fewer than those of its pixels, so a cache that keeps them
    (`open_source(decoders={"image": "raw"})`) holds more samples, and each epoch decodes them anew.

    Args:
        size: the shorter side, or (height, width), as `ImageOptions.resize`. None: as in the file.
        crop: the side of a square from the middle, or (height, width). None: no crop.
        device: where the pixels are delivered; None: in host memory.
        field: the field with the bytes, a list of bytes in each batch. Others are left as they are.

    The field becomes uint8 `[B, 3, H, W]` RGB where all images have one size, which `size` or `crop` may see
    to, and otherwise a list of `[3, H, W]`. Raises ConfigError for wrong sizes and for batches without such a
    field; the transform raises SampleError for bytes that are no image.
    """
    return DecodeImages(ImageOptions(size, crop), None if device is None else torch.device(device), field)


class DecodeImages:
    """See `decode_images`. Picklable; its threads are started at the first batch of a process."""

    def __init__(self, options: ImageOptions, device: torch.device | None, field: str) -> None:
        self._options, self._device, self._field = options, device, field
        self._lock = threading.Lock()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def __call__(self, batch: Any) -> Any:
        """Return `batch` with its images decoded."""
        if not isinstance(batch, Mapping) or self._field not in batch:
            names = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise ConfigError(f"decode_images(field={self._field!r}): the batch has {names}")
        values = batch[self._field]
        if not isinstance(values, list) or not all(isinstance(value, bytes) for value in values):
            raise ConfigError(
                f"decode_images(field={self._field!r}): the field is no list of bytes; keep the bytes of "
                f"files in the cache by open_source(decoders={{{self._field!r}: 'raw'}})"
            )
        return {
            **batch,
            self._field: self._delivered(list(self._threads().map(self._decode, enumerate(values)))),
        }

    def _decode(self, numbered: tuple[int, bytes]) -> np.ndarray[Any, Any]:
        number, data = numbered
        decoder = partial(decode_image, options=self._options)
        try:
            where = f"field '{self._field}', sample {number} of the batch"
            pixels: np.ndarray[Any, Any] = decode_with(decoder, data, "image", where)
        except SampleError as error:
            raise SampleError(
                f"{error}; a transform= that decodes it finds such samples before they are cached"
            ) from error
        return pixels

    def _delivered(self, images: list[np.ndarray[Any, Any]]) -> torch.Tensor | list[torch.Tensor]:
        if len({image.shape for image in images}) == 1:
            return self._moved(torch.from_numpy(np.stack(images)))
        return [self._moved(torch.from_numpy(image)) for image in images]

    def _moved(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels if self._device is None else pixels.to(self._device)

    def _threads(self) -> ThreadPoolExecutor:
        """The threads of this process: those of its parent do not survive a fork."""
        with self._lock:
            if self._pool is None or self._pool[0] != os.getpid():
                pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)), "cachestream-decode")
                self._pool = os.getpid(), pool
            return self._pool[1]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_pool")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _pool=None)

    def __repr__(self) -> str:
        return f"decode_images({self._options}, field={self._field!r})"
