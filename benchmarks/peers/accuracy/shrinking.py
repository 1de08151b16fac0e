"""Transforms of the views. Apart from the rest, which would make sampling processes load torch."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from cachestream.demo.data import SIDE, shrink

__all__ = ["shrink_jpeg", "shrink_view"]


def shrink_view(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample of WebDataset's tars, decoded, as uint8 `[3, SIDE, SIDE]` and its label."""
    return shrink({"image": sample["jpg"], "label": sample["cls"]})


def shrink_jpeg(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a sample whose "jpg" are bytes: it comes from a column of bytes."""
    with Image.open(io.BytesIO(sample["jpg"])) as view:
        small = view.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX, reducing_gap=2.0)
    return {"image": np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1)), "label": sample["cls"]}
