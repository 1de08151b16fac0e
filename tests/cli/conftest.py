"""A folder of pictures to fill caches from, and a place for a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.support import COUNT


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small pictures in two classes."""
    root = tmp_path_factory.mktemp("remote")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        folder = root / ("cats", "dogs")[number % 2]
        folder.mkdir(exist_ok=True)
        pixels = rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    return root


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
