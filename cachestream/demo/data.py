"""Remote of the demo: JPEG views of places in scikit-image's photographs, in a folder for each place.

The task is to recognise the place (one of 135) in a view of varying position and scale. Training needs many
views of each place, so accuracy follows the number of samples cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from cachestream.config import require
from cachestream.errors import ConfigError

TRAIN: Final = "train"
HELD_OUT: Final = "held-out"
SIDE: Final = 48  # pixels of the views that are cached
PHOTOGRAPHS: Final = (
    "astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "coffee.png", "coins.png",
    "grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png", "moon.png", "motorcycle_left.png",
    "retina.jpg", "rocket.jpg",
)  # fmt: skip
GRID: Final = 3  # a photograph is cut into 3 × 3 places
PLACES: Final = len(PHOTOGRAPHS) * GRID * GRID
LARGEST: Final = (720, 720)
VIEW: Final = (0.5, 0.9)  # side of a view, as a share of its place's shorter side
JPEG_QUALITY: Final = 90


def make_remote(root: Path, num_samples: int, num_held_out: int) -> int:
    """Write `num_samples` views to `root`/train and `num_held_out` others to `root`/held-out, the same each
    time; returns the bytes of the first.

    Raises ConfigError without scikit-image, and for fewer samples than places.
    """
    if min(num_samples, num_held_out) < PLACES:
        raise ConfigError(f"the demo needs at least {PLACES} samples, one for each place; give more")
    photographs = _photographs()
    for folder, place in itertools.product((TRAIN, HELD_OUT), range(PLACES)):
        (root / folder / _place_name(place)).mkdir(parents=True)

    def write(number: int) -> int:
        return _write_view(photographs, root / (TRAIN if number < num_samples else HELD_OUT), number)

    with ThreadPoolExecutor(4) as threads:
        sizes = list(threads.map(write, range(num_samples + num_held_out)))
    return sum(sizes[:num_samples])


def shrink(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The demo's transform, run in the background: a view of any size becomes uint8 `[3, SIDE, SIDE]`."""
    view = Image.fromarray(np.ascontiguousarray(sample["image"].transpose(1, 2, 0)))
    small = np.asarray(view.resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=2.0))
    return {"image": np.ascontiguousarray(small.transpose(2, 0, 1)), "label": sample["label"]}


def _photographs() -> list[Image.Image]:
    folder = Path(require("skimage", "demo", "the demo").__file__).parent / "data"
    photographs = [Image.open(folder / name).convert("RGB") for name in PHOTOGRAPHS]
    for photograph in photographs:
        photograph.thumbnail(LARGEST)
    return photographs


def _place_name(place: int) -> str:
    photograph, cell = divmod(place, GRID * GRID)
    return f"{Path(PHOTOGRAPHS[photograph]).stem}-{cell}"


def _write_view(photographs: list[Image.Image], folder: Path, number: int) -> int:
    """Write view `number`, a random square in place `number % PLACES`; returns its size in bytes."""
    place = number % PLACES
    photograph, cell = photographs[place // (GRID * GRID)], place % (GRID * GRID)
    rng, cells = np.random.default_rng(number), np.array(photograph.size) / GRID
    side = float(cells.min()) * rng.uniform(*VIEW)
    row, column = divmod(cell, GRID)
    left, top = np.array([column, row]) * cells + rng.uniform(size=2) * (cells - side)
    path = folder / _place_name(place) / f"{number:06d}.jpg"
    photograph.crop((int(left), int(top), int(left + side), int(top + side))).save(path, quality=JPEG_QUALITY)
    return path.stat().st_size
