"""The example of augmentations on whole batches runs, and its operations are what they say."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked import fork_script

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "augment.py"
SMALL = ("--samples", "64", "--size", "40", "--crop", "32", "--batch-size", "16")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *SMALL])
    return runpy.run_path(str(EXAMPLE), run_name="example")


@pytest.mark.e2e
@pytest.mark.usefixtures("forked")
def test_the_example_says_what_the_augmentations_cost() -> None:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = fork_script(EXAMPLE, SMALL, cwd=ROOT, environment=environment, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r" [0-9,]+ images/s$", done.stdout, re.MULTILINE)) == 2


def test_every_image_is_cropped_at_a_place_of_its_own(example: dict[str, Any]) -> None:
    # Each pixel is its own number, so a crop tells where it was taken.
    images = torch.arange(50 * 2 * 9 * 11).view(50, 2, 9, 11)
    crops = example["random_crop"](images, 6)
    places = set()
    for number, crop in enumerate(crops):
        first = int(crop[0, 0, 0]) - number * 2 * 99
        top, left = divmod(first, 11)
        assert torch.equal(crop, images[number, :, top : top + 6, left : left + 6])
        places.add((top, left))
    assert len(places) > 5
    assert torch.equal(example["random_crop"](images[:, :, :, :9], 9), images[:, :, :, :9])


def test_about_half_of_the_images_are_mirrored_and_none_is_mixed(example: dict[str, Any]) -> None:
    images = torch.arange(200 * 3 * 2 * 4).view(200, 3, 2, 4)
    flipped = example["random_flip"](images.clone())
    turned = [torch.equal(new, old.flip(-1)) for new, old in zip(flipped, images, strict=True)]
    kept = [torch.equal(new, old) for new, old in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(turned, kept, strict=True))
    assert 50 < sum(turned) < 150  # 100 are expected, with a deviation of 7


def test_normalised_images_are_floats_around_zero(example: dict[str, Any]) -> None:
    images = torch.full((2, 3, 4, 4), 128, dtype=torch.uint8)
    normal = example["normalise"](images)
    expected = (128 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(normal, expected[None, :, None, None].expand(2, 3, 4, 4), atol=1e-5)
    batch = {"image": torch.zeros(16, 3, 40, 40, dtype=torch.uint8), "label": torch.arange(16)}
    augmented = example["augment"](batch, torch.Generator())
    assert augmented["image"].shape == (16, 3, 32, 32)
    assert torch.equal(augmented["label"], batch["label"])
