"""`cs.decode_images`: images that a cache keeps encoded are decoded when a batch is made."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import cachestream as cs
from tests.contract.loader_acts import PATIENCE_S

COUNT = 24


def jpeg(number: int) -> bytes:
    sink = io.BytesIO()
    pixels = np.full((40 + number % 3 * 8, 64, 3), 10 * number, np.uint8)
    Image.fromarray(pixels).save(sink, "JPEG")
    return sink.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(COUNT):
        (folder / f"{number:02d}.jpg").write_bytes(jpeg(number))
    return folder


@pytest.fixture(scope="module")
def encoded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoded") / "cache"
    source = cs.open_source(str(folder), decoders={"image": "raw"})
    with (
        cs.Cache(path, size_limit="50MB", min_free=0) as cache,
        cs.start_worker(cache, source, num_workers=1) as worker,
    ):
        assert worker.wait(PATIENCE_S)
    return path


def batches(path: Path, transform: Any, **options: Any) -> list[Any]:
    given = {"shuffle": False, "drop_last": False, "with_keys": True, **options}
    with cs.Cache(path) as cache, cs.EpochLoader(cache, 6, batch_transform=transform, **given) as loader:
        return list(loader)


def test_pixels_are_those_that_the_source_would_have_decoded(folder: Path, encoded: Path) -> None:
    plain = cs.open_source(str(folder), resize=32, crop=24)
    wanted = {
        key: sample["image"]
        for unit in range(COUNT)
        for key, sample in plain.read(unit, np.random.default_rng())
    }
    found = batches(encoded, cs.decode_images(32, crop=24))
    assert sum(len(batch["image"]) for batch in found) == COUNT
    for batch in found:
        assert batch["image"].shape == (6, 3, 24, 24)
        assert batch["image"].dtype == torch.uint8
        for key, pixels in zip(batch["__key__"], batch["image"], strict=True):
            assert (pixels.numpy() == wanted[key]).all()


def test_images_of_several_sizes_are_a_list(encoded: Path) -> None:
    (batch, *_) = batches(encoded, cs.decode_images())
    assert isinstance(batch["image"], list)
    assert {tuple(image.shape) for image in batch["image"]} == {(3, 40, 64), (3, 48, 64), (3, 56, 64)}


def test_it_is_delivered_to_a_device_and_goes_to_other_processes() -> None:
    transform = pickle.loads(pickle.dumps(cs.decode_images(32, crop=24, device="cpu", field="jpg")))
    found = transform({"jpg": [jpeg(1), jpeg(2)], "label": 7})
    assert found["jpg"].shape == (2, 3, 24, 24)
    assert found["jpg"].device == torch.device("cpu")
    assert found["label"] == 7


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"pixels": []}, r"field='image'\): the batch has \['pixels'\]"),
        ({"image": torch.zeros(2, 3, 4, 4)}, "the field is no list of bytes; keep the bytes of files"),
        ([b""], "the batch has list"),
    ],
)
def test_what_holds_no_encoded_images_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(cs.ConfigError, match=words):
        cs.decode_images()(batch)


def test_wrong_sizes_and_bytes_that_are_no_image_say_so() -> None:
    with pytest.raises(cs.ConfigError, match="resize=0"):
        cs.decode_images(0)
    with pytest.raises(cs.SampleError, match="sample 1 of the batch: not a usable image"):
        cs.decode_images()({"image": [jpeg(1), b"no image"]})
