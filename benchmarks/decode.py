"""Decoding JPEGs on one thread: `python -m benchmarks.decode`.

A smooth photograph with noise of 640 × 480 and one of 2560 × 1920, quality 90, to uint8 `[3, H, W]`, and to
`resize=224, crop=224`. "Pillow, full size" is the plain way: decode all of it, then resize. The ways take
turns; the best of five rounds counts. A second is one of this thread's on a core, so that others who use the
machine count less.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import numpy as np
from PIL import Image

from benchmarks.measure import emit
from cachestream.sources.decode import images
from cachestream.sources.decode.images import ImageOptions, decode_image

SIZES: Final = ((640, 480), (2560, 1920))
ROUNDS: Final = 5
ROUND_S: Final = 0.4
SMALL: Final = ImageOptions(resize=224, crop=224)


def photograph(width: int, height: int, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(smooth).astype(np.int16) + rng.normal(0, 6, (height, width, 3)).astype(np.int16)
    stream = io.BytesIO()
    Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


@contextmanager
def without_simplejpeg() -> Iterator[None]:
    kept = sys.modules.get("simplejpeg")
    sys.modules["simplejpeg"] = None  # type: ignore[assignment]  # how Python notes what cannot be imported
    images._turbo.cache_clear()
    try:
        yield
    finally:
        if kept is None:
            del sys.modules["simplejpeg"]
        else:
            sys.modules["simplejpeg"] = kept
        images._turbo.cache_clear()


def pillow_full_size(data: bytes) -> np.ndarray[Any, Any]:
    with Image.open(io.BytesIO(data)) as image:
        rgb = image.convert("RGB").resize(SMALL.resized(*image.size), Image.Resampling.BILINEAR)
    return SMALL.cropped(np.ascontiguousarray(np.asarray(rgb).transpose(2, 0, 1)))


def rate(decode: Callable[[bytes], object], data: bytes, times: int) -> float:
    """Images a second."""
    begun_s = time.thread_time()
    for _ in range(times):
        decode(data)
    return times / (time.thread_time() - begun_s)


def decode_small(data: bytes) -> np.ndarray[Any, Any]:
    return decode_image(data, SMALL)


# The name of a figure → what decodes, and whether simplejpeg may.
WAYS: Final[dict[str, tuple[Callable[[bytes], object], bool]]] = {
    "whole_pillow": (decode_image, False),
    "whole_simplejpeg": (decode_image, True),
    "to_224_pillow_full_size": (pillow_full_size, False),
    "to_224_pillow": (decode_small, False),
    "to_224_simplejpeg": (decode_small, True),
}


def main() -> None:
    best: dict[str, float] = {}
    for width, height in SIZES:
        data = photograph(width, height)
        times = {name: max(1, round(ROUND_S * rate(decode, data, 1))) for name, (decode, _) in WAYS.items()}
        for _ in range(ROUNDS):
            for name, (decode, with_simplejpeg) in WAYS.items():
                figure = f"images_per_s_{width}x{height}_{name}"
                with nullcontext() if with_simplejpeg else without_simplejpeg():
                    best[figure] = max(best.get(figure, 0.0), round(rate(decode, data, times[name]), 1))
    emit(**best)


if __name__ == "__main__":
    main()
