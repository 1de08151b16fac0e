"""Train on clips of videos, which the plug-in cachestream-video reads by ranges with torchcodec.

    python examples/video_clips.py "s3://bucket/train/*.mp4" /scratch/clips     (label=: see label_of)
    python examples/video_clips.py      (films camera pans over photographs into ./video-demo, and reads those)

Needs FFmpeg and `pip install ./plugins/cachestream-video`. Only the ranges of the clips are fetched, four clips of a film
in a pass. The direction of a pan is seen in no single frame. The last line is the accuracy on films that are held out.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import skimage.data
import torch
from torch import nn

import cachestream as cs

DIRECTIONS = ("down", "left", "right", "up")
STEPS = {"down": (2, 0), "left": (0, -2), "right": (0, 2), "up": (-2, 0)}


def label_of(key: str) -> int:
    """The label of a film, from its path below the common root: "left/003.mp4"."""
    return DIRECTIONS.index(key.split("/")[-2])


def film(path: Path, photo: npt.NDArray[np.uint8], direction: str, rng: np.random.Generator) -> None:
    """Pan over a photograph for 40 frames of 64 x 64 pixels, in H.264 with a keyframe every 20."""
    from torchcodec.encoders import VideoEncoder

    down, right = STEPS[direction]
    top, left = (int(rng.integers(80, side - 144)) for side in photo.shape[:2])
    views = [photo[top + down * t :, left + right * t :][:64, :64] for t in range(40)]
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = torch.from_numpy(np.stack(views).transpose(0, 3, 1, 2).copy())
    VideoEncoder(frames, frame_rate=25).to_file(path, codec="libx264", extra_options={"g": 20, "bf": 2})


def make_films(folder: Path) -> tuple[str, str]:
    """Ten films of each direction to train on, and three that are held out."""
    rng = np.random.default_rng(0)
    photos = [getattr(skimage.data, name)() for name in ("astronaut", "coffee", "chelsea")]
    for direction in DIRECTIONS:
        for number in range(13):
            part = "train" if number < 10 else "test"
            film(folder / part / direction / f"{number:03d}.mp4", photos[rng.integers(3)], direction, rng)
    return str(folder / "train"), str(folder / "test")


demo = Path("video-demo")
train, test = make_films(demo) if len(sys.argv) < 3 else (sys.argv[1], sys.argv[1])
cache = sys.argv[2] if len(sys.argv) > 2 else demo / "cache"
options: dict[str, Any] = {"format": "video", "frames": 8, "stride": 4, "clips": 4, "label": label_of}
options["resize"] = (32, 32)

layers = [nn.Conv3d(1, 16, (3, 7, 7), (1, 2, 2)), nn.ReLU(), nn.Conv3d(16, 16, 3), nn.ReLU()]
network = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 4))


def scores(video: torch.Tensor) -> torch.Tensor:
    """The network's output for clips, uint8 `[B, 8, 3, 32, 32]`: `[B, 4]`."""
    grey = video.float().mean(2)[:, None]
    grey = grey - grey.mean((2, 3, 4), keepdim=True)
    return torch.as_tensor(network(grey / (grey.std((2, 3, 4), keepdim=True) + 1)))


optimizer = torch.optim.Adam(network.parameters(), 5e-3)
source = cs.open_source(train, **options)  # a plug-in's own options are those of open_source
# A process reads several films at once; more of them pay where there are more cores.
with cs.stream(source, cache, "1GB", batch_size=32, epoch_size=576, min_samples=100, num_workers=1) as loader:
    for epoch in range(3):
        losses = []
        for batch in loader:  # "video" uint8 [32, 8, 3, 32, 32], "label" int64 [32], "seconds" float64 [32]
            loss = nn.functional.cross_entropy(scores(batch["video"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: of {loader.cache.num_samples:,} clips, loss {np.mean(losses):.2f}")

held_out, rng = cs.open_source(test, **options), np.random.default_rng(0)
samples = [sample for unit in range(held_out.num_units or 0) for _, sample in held_out.read(unit, rng)]
with torch.inference_mode():
    found = scores(torch.from_numpy(np.stack([sample["video"] for sample in samples]))).argmax(1).numpy()
right = np.mean(found == [sample["label"] for sample in samples])
print(f"{right:.1%} of {len(samples)} held-out clips are told by their direction; by chance 25.0")
