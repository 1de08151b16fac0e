r"""Pre-train a model of torchtitan 0.2 on tokens from a remote: its own trainer, with our loader.

    PYTHONPATH=examples torchrun --nproc-per-node=8 -m torchtitan.train --model.name llama3_cached \
        --experimental.custom_import torchtitan_tokens --job.custom_config_module torchtitan_tokens \
        --training.dataset_path "s3://bucket/tokens/*.npy" --cached.folder /scratch/tokens

The remote holds arrays of token numbers, [N] each; a sample is a window of seq_len + 1 of them.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.llama3 import get_train_spec
from torchtitan.protocols.train_spec import register_train_spec

import cachestream as cs


@dataclasses.dataclass
class Cached:
    folder: str = "/scratch/tokens"
    """The cache, on a local disk of each node"""
    size_limit: str = "200GB"
    """The most that it takes of the disk"""


@dataclasses.dataclass
class JobConfig:  # torchtitan adds these to its own options
    cached: Cached = dataclasses.field(default_factory=Cached)


class CachedTokens(BaseDataLoader):  # type: ignore[misc]
    """Windows of tokens for torchtitan; a checkpoint of it holds the position in the epoch."""

    def __init__(self, dp_world_size: int, dp_rank: int, job_config: Any, tokenizer: None = None) -> None:
        if job_config.parallelism.pipeline_parallel_degree > 1:
            raise ValueError(
                "ranks of one pipeline are not consecutive: give cs.stream a mesh= and replicate="
            )
        training, cached = job_config.training, job_config.cached
        tokens = cs.open_source(training.dataset_path, window=(training.seq_len + 1,))
        self.loader = cs.stream(
            tokens,
            cached.folder,
            cached.size_limit,
            batch_size=training.local_batch_size,
            # Consecutive ranks, of tensor and context parallelism, need the same batch.
            replicate=torch.distributed.get_world_size() // dp_world_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for batch in self.loader:  # every iteration is a new epoch over what is cached by now
                tokens = batch["array"].long()
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"loader": json.dumps(self.loader.state_dict())}  # the same on all ranks

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(json.loads(state_dict["loader"]))


register_train_spec(
    "llama3_cached",
    dataclasses.replace(get_train_spec(), build_dataloader_fn=CachedTokens, build_tokenizer_fn=None),
)
