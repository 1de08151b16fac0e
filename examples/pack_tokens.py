"""Train a small language model on windows packed from documents: text is tokenised and packed in the background.

    python examples/pack_tokens.py [URL of JSON Lines or Parquet with a field "text"]

Without a URL: the pages of Python's own help, as a JSON Lines file. A tokenizer (BPE) is trained on them first.
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

import cachestream as cs

BLOCK, BATCH, EPOCHS = 128, 16, 2
EOS, PAD = 0, 1


def train_tokenizer(texts: list[str], vocab_size: int = 2000) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        moved: Tensor = x + self.mlp(self.norms[1](x))
        return moved


class LanguageModel(nn.Module):
    def __init__(self, vocab_size: int, block_size: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocab_size))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss over next tokens of the same document; attention stays within documents."""
        tokens, ids = batch["tokens"].long(), batch["document_ids"]
        documents = ids[:, :-1]
        mask = (documents[:, None, :] == documents[:, :, None]).tril()[:, None]
        x = self.tokens(tokens[:, :-1]) + self.positions(batch["positions"][:, :-1].long())
        for block in self.blocks:
            x = block(x, mask)
        follows = (ids[:, 1:] == documents) & (documents >= 0)
        return nn.functional.cross_entropy(self.head(x)[follows], tokens[:, 1:][follows])


def main(url: str = "") -> None:
    torch.manual_seed(0)
    if not url:
        url = "help.jsonl"
        lines = "".join(json.dumps({"text": text}) + "\n" for text in topics.values())
        Path(url).write_text(lines, encoding="utf-8")
    tokenizer = train_tokenizer(list(topics.values()))
    packing = cs.pack_tokens(BLOCK, "text", tokenizer=tokenizer, eos=EOS, pad=PAD)
    model = LanguageModel(tokenizer.get_vocab_size(), BLOCK)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-3)
    with cs.stream(
        url, "cache", "200MB", batch_size=BATCH, transform=packing, num_workers=1, min_samples=600
    ) as loader:
        losses: list[float] = []
        for epoch in range(EPOCHS):
            losses.clear()
            for batch in loader:
                loss = model.loss(batch)
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                losses.append(float(loss.detach()))
            print(f"epoch {epoch}: {len(losses)} steps, loss {sum(losses) / len(losses):.2f}")
        windows = loader.cache.num_samples
        with loader.cache.snapshot() as dataset:
            print("a window begins:", repr(tokenizer.decode(dataset[0]["tokens"].tolist()[:24])))
    print(f"{windows} windows of {BLOCK + 1} tokens; the loss fell to {losses[-1]:.2f} nats a token")


if __name__ == "__main__":
    main(*sys.argv[1:])
