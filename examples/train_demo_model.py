"""Train the weights of `aiodatadist.model` from scratch, on text this script draws itself.

    python -m venv .venv-train && .venv-train/bin/pip install torch numpy
    PYTHONPATH=. .venv-train/bin/python examples/train_demo_model.py --out aiodatadist/model/weights.npz

torch is needed here and nowhere else: the package runs the weights with numpy. Training text comes from
`aiodatadist.model.prompts`, so there is nothing to download. One run takes about ten minutes on two cores. It
is seeded: the same torch build on the same kind of processor, with the same `--threads`, gives the same
weights; another build gives other weights of the same quality. At the end the script loads the file it wrote
into the numpy model and compares the two implementations on held-out prompts.

The schedule is a curriculum. What makes the model useful for checking a KV cache is copying from far back. It
arises within some 150 steps on short lists of random words that are told twice, where every byte of the
repetition asks for it; on texts whose words can mostly be guessed it takes far longer. Short texts then teach
where to copy from, and long ones stretch the distance.

The weights in the package come from a shorter run, stopped after the third phase and resumed with a fresh optimizer for
110 and 120 steps of the last two (rate falling from 0.8 of its peak to zero); a full run of this script does better.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from aiodatadist.model import prompts, tokenizer
from aiodatadist.model.transformer import Model, ModelConfig

TELLING_WEIGHT = 0.1
"""Loss weight of the prompt's bytes: mostly random draws, which nobody can predict."""


@dataclass(frozen=True)
class Phase:
    """One stage of the curriculum.

    Attributes
    ----------
    steps
        Batches.
    rows, length
        Texts of a batch and tokens of each; longer texts are cut.
    lists
        How many of the rows are lists of random words; the others are prompts with their continuations.
    longest
        Longest prompt in bytes.
    """

    steps: int
    rows: int
    length: int
    lists: int
    longest: int


PHASES = (
    Phase(steps=180, rows=24, length=112, lists=24, longest=60),
    Phase(steps=150, rows=16, length=200, lists=8, longest=130),
    Phase(steps=400, rows=12, length=256, lists=4, longest=170),
    Phase(steps=350, rows=8, length=448, lists=2, longest=300),
    Phase(steps=350, rows=5, length=1024, lists=1, longest=620),
)


class TorchBlock(nn.Module):  # type: ignore[misc, unused-ignore]  # Any where torch is missing
    """The decoder block of `aiodatadist.model.transformer`, on float32 `[rows, length, d_model]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        c = config
        self.attention_norm = nn.Parameter(torch.ones(c.d_model))
        self.ffn_norm = nn.Parameter(torch.ones(c.d_model))
        # Stored as [inputs, outputs], the layout that the numpy model multiplies with.
        self.wqkv = nn.Parameter(torch.randn(c.d_model, (c.heads + 2 * c.kv_heads) * c.head_dim) / math.sqrt(c.d_model))
        residual = 1 / math.sqrt(2 * c.layers)
        self.wo = nn.Parameter(torch.randn(c.heads * c.head_dim, c.d_model) * residual / math.sqrt(c.d_model))
        self.w13 = nn.Parameter(torch.randn(c.d_model, 2 * c.ffn) / math.sqrt(c.d_model))
        self.w2 = nn.Parameter(torch.randn(c.ffn, c.d_model) * residual / math.sqrt(c.ffn))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        c = self.config
        rows, length, _ = x.shape
        h = F.rms_norm(x, (c.d_model,), self.attention_norm, c.norm_eps) @ self.wqkv
        q, k, v = h.split([c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], dim=-1)
        q = rotate(q.view(rows, length, c.heads, c.head_dim).transpose(1, 2), cos, sin)
        k = rotate(k.view(rows, length, c.kv_heads, c.head_dim).transpose(1, 2), cos, sin)
        v = v.view(rows, length, c.kv_heads, c.head_dim).transpose(1, 2)
        group = c.heads // c.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).reshape(rows, length, -1) @ self.wo
        gate, up = (F.rms_norm(x, (c.d_model,), self.ffn_norm, c.norm_eps) @ self.w13).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ self.w2


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` `[rows, heads, length, head_dim]`; `cos` and `sin` are `[length, head_dim / 2]`."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class TorchModel(nn.Module):  # type: ignore[misc, unused-ignore]
    """The whole transformer: tokens `[rows, length]` to logits `[rows, length, vocab]`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(config.vocab, config.d_model) * 0.02)
        self.blocks = nn.ModuleList(TorchBlock(config) for _ in range(config.layers))
        self.final_norm = nn.Parameter(torch.ones(config.d_model))
        cos, sin = config.rotary_tables()
        self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("sin", torch.from_numpy(sin), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        x = self.embedding[tokens]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return F.rms_norm(x, (self.config.d_model,), self.final_norm, self.config.norm_eps) @ self.embedding.T


def draw_list(rng: random.Random, length: int) -> prompts.Prompt:
    """Draw words of random letters, at least `length` bytes, and their repetition: nothing but copying."""
    words = ""
    while len(words) < length:
        words += " " + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8))).capitalize()
    return prompts.Prompt(words + prompts.CUE, words + prompts.END)


def draw_batch(rng: random.Random, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens `[rows, length + 1]` (int64) and loss weights `[rows, length + 1]` (float32).

    A row is one story, cut at `length + 1` or padded with weight 0: at run time there is no other story
    before a prompt either.
    """
    tokens = np.full((phase.rows, phase.length + 1), tokenizer.EOS, dtype=np.int64)
    weights = np.zeros((phase.rows, phase.length + 1), dtype=np.float32)
    for row in range(phase.rows):
        if row < phase.lists:
            story = draw_list(rng, rng.randint(10, min(120, phase.longest * 3 // 4)))
        else:
            story = prompts.draw_prompt(rng, rng.randint(prompts.MIN_LENGTH, phase.longest))
        telling = tokenizer.encode(story.text)
        retelling = [*story.continuation.encode(), tokenizer.EOS]
        text = [*telling, *retelling][: phase.length + 1]
        tokens[row, : len(text)] = text
        weights[row, : len(text)] = 1.0
        weights[row, : len(telling)] = TELLING_WEIGHT
    return torch.from_numpy(tokens), torch.from_numpy(weights)


def train(config: ModelConfig, seed: int, scale: float, out: Path) -> TorchModel:
    """Train a model, saved to `out` after each phase; `scale` multiplies the steps, for a quick trial."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = TorchModel(config)
    matrices = [p for block in model.blocks for p in block.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    # Muon learns the matrices in about half the steps AdamW takes here; embedding and norms stay with AdamW,
    # as usual.
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0)
    peaks = [(group, group["lr"]) for optimizer in (muon, adam) for group in optimizer.param_groups]
    total = sum(int(phase.steps * scale) for phase in PHASES)
    step, begin = 0, time.monotonic()
    for phase in PHASES:
        for _ in range(int(phase.steps * scale)):
            factor = min(1.0, (step + 1) / 30) * min(1.0, (total - step) / (0.6 * total) + 0.02)
            for group, peak in peaks:
                group["lr"] = peak * factor
            tokens, weights = draw_batch(rng, phase)
            logits = model(tokens[:, :-1])
            losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
            weight = weights[:, 1:].flatten()
            loss = (losses * weight).sum() / weight.sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 20 == 0:
                parts = []
                for name, rows in (("lists", slice(0, phase.lists)), ("prompts", slice(phase.lists, None))):
                    chosen = weights[rows, 1:] == 1.0
                    part = losses.detach().view_as(weights[:, 1:])[rows][chosen]
                    parts.append(f"{name} {part.mean().item():.3f}" if len(part) else f"{name} -")
                seconds = time.monotonic() - begin
                print(f"step {step}/{total}, {seconds:.0f} s, nats/byte: {', '.join(parts)}", flush=True)
        save(model, out)
    return model


def save(model: TorchModel, path: Path) -> None:
    """Write the weights as float16 and the configuration as JSON into one .npz, without pickle."""
    arrays: dict[str, np.ndarray] = {"config": np.array(json.dumps(asdict(model.config)))}
    for name, parameter in model.named_parameters():
        arrays[name] = parameter.detach().numpy().astype(np.float16)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type, unused-ignore]  # numpy's stub takes it for allow_pickle
    path.write_bytes(buffer.getvalue())


def compare(path: Path, seed: int) -> None:
    """Compare numpy and torch on held-out prompts and print what the model writes."""
    numpy_model = Model.load(path)
    config = numpy_model.config
    model = TorchModel(config)
    with np.load(path, allow_pickle=False) as stored, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(stored[name].astype(np.float32)))
    rng = random.Random(seed)
    found = wanted = 0
    for length in (200, 300, 400, 500):
        story = prompts.draw_prompt(rng, length)
        tokens = tokenizer.encode(story.text)
        kv, table = numpy_model.allocate_kv(64), range(64)
        logits = numpy_model.prefill(tokens, kv, table)
        with torch.no_grad():
            expected = model(torch.tensor([tokens]))[0, -1].numpy()
        written = tokenizer.decode(numpy_model.generate_greedy(tokens, kv, table, 256))
        words = story.continuation[: len(written)].split()
        wanted += len(words)
        found += sum(word in written for word in words)
        print(f"\n{story.text}|{written}")
        print(f"largest difference of a logit to torch: {np.abs(logits - expected).max():.2e}")
    print(f"\n{found / wanted:.1%} of the words that a perfect reader writes are there")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the weights of aiodatadist.model.")
    parser.add_argument("--out", type=Path, required=True, help="the .npz to write")
    parser.add_argument("--seed", type=int, default=20240)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps; 0.05 is a quick trial")
    parser.add_argument("--compare-only", action="store_true", help="only compare the existing file with torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not arguments.compare_only:
        train(ModelConfig(), arguments.seed, arguments.scale, arguments.out)
    compare(arguments.out, arguments.seed + 1)


if __name__ == "__main__":
    main()
