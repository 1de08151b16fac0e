"""Make a folder of images to try train_ddp.py on, from photographs that scikit-image ships; no network needed.

python examples/make_images.py photos
"""

import sys
from pathlib import Path

from cachestream.demo.data import make_remote

if __name__ == "__main__":
    size_bytes = make_remote(Path(sys.argv[1]), num_samples=6000, num_held_out=540)
    print(f"{size_bytes:,} bytes of views in {sys.argv[1]}/train, and others in {sys.argv[1]}/held-out")
