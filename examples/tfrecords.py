"""Train from TFRecords of tf.train.Example, without TensorFlow: hear the pitch of tones in noise.

    python examples/tfrecords.py "s3://bucket/train-*.tfrecord" "s3://bucket/test-*.tfrecord" /scratch/tones
    python examples/tfrecords.py              (makes small files in ./tfrecords-demo; the package tfrecord writes them)

`features` names what to keep, and what each is to be: two channels, written one after the other, are an array
[2, 256], a single number is a scalar, and the name is left out. The last line is the error on the second files.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tfrecord import TFRecordWriter
from torch import nn

import cachestream as cs

RATE_HZ, LENGTH = 4000, 256


def make_files(folder: Path) -> tuple[str, str]:
    """Tones between 200 and 1200 Hz as two microphones hear them: eight files to train on, one held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate((*(f"train-{i}" for i in range(8)), "test-0")):
        rng = np.random.default_rng(number)
        writer = TFRecordWriter(str(folder / f"{name}.tfrecord"))
        for pitch_hz in rng.uniform(200, 1200, 160):
            turns = pitch_hz * np.arange(LENGTH) / RATE_HZ + rng.random((2, 1))
            wave = np.sin(2 * np.pi * turns) + rng.normal(0, 0.5, (2, LENGTH))
            writer.write(
                {"wave": (wave.ravel(), "float"), "pitch_hz": (pitch_hz, "float"), "name": (b"-", "byte")}
            )
        writer.close()
    return str(folder / "train-*.tfrecord"), str(folder / "test-*.tfrecord")


def to_spectrum(batch: dict[str, Any]) -> dict[str, Any]:
    """Whole batches: how strong each frequency is in both channels together, [B, 129], and the pitch in kHz."""
    strengths = torch.fft.rfft(batch["wave"] * torch.hann_window(LENGTH)).abs().mean(1)
    return {"spectrum": strengths / strengths.mean(1, keepdim=True), "khz": batch["pitch_hz"] / 1000}


demo = Path("tfrecords-demo")
train, test = sys.argv[1:3] if len(sys.argv) > 3 else make_files(demo)
cache = sys.argv[3] if len(sys.argv) > 3 else demo / "cache"
features = {"wave": (2, LENGTH), "pitch_hz": "scalar"}

network = nn.Sequential(nn.Linear(LENGTH // 2 + 1, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(network.parameters(), 3e-3)
with cs.stream(
    train, cache, "1GB", features=features, batch_size=32, epoch_size=1280, batch_transform=to_spectrum
) as loader:
    for epoch in range(6):
        losses = []
        for batch in loader:
            loss = nn.functional.l1_loss(network(batch["spectrum"])[:, 0], batch["khz"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: of {loader.cache.num_samples:,} tones, {1000 * np.mean(losses):.0f} Hz off")

# What is small can be read without a cache.
source, rng = cs.open_source(test, features=features), np.random.default_rng(0)
tones = [sample for unit in range(source.num_units or 0) for _, sample in source.read(unit, rng)]
held_out = to_spectrum({name: torch.tensor(np.stack([tone[name] for tone in tones])) for name in features})
with torch.inference_mode():
    errors = (network(held_out["spectrum"])[:, 0] - held_out["khz"]).abs()
print(f"{1000 * errors.median():.0f} Hz off, median over {len(tones)} held-out tones")
