#!/usr/bin/env python
"""Train a small DeepSeek-V3.2 on text and measure how much the keys that neighbouring queries select overlap.

    python tools/bench/selection_overlap.py --text FOLDER [FOLDER ...] [--dense-steps 150] [--sparse-steps 800]

Each folder is one kind of text: its .py, .md, .rst and .txt files, also in subfolders, cut into pieces. Training reads
equal amounts of each kind in random order. Some pieces are held out, and the selections are measured on them, one piece
per sequence. The tokenizer is trained on the same text.

In the first steps, attention uses all keys and the indexer is trained on all of them; after that both use the selected
keys. ``--seconds`` ends training early; the first part then takes a third of them. The model has 6 layers without
experts, with the attention sizes of the release except for 16 heads of attention and of the indexer. Further arguments
are options of the job. ``--tiny`` trains a debug model, for a test on a CPU.

Only queries that see more than top-k keys count. The random selections are what the benchmarks of sparse attention use.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import CONFIGS, ONE_RANK, machine, rank_environment, trainer_of
from make_corpus import tokenizer_config, train_tokenizer

SUFFIXES = (".py", ".md", ".rst", ".txt")
PIECE = 32768
"""Characters of a piece of text."""
HELD_OUT = 4
"""Sequences of each kind of text that are measured."""
BLOCKS = (2, 4, 8, 16)
"""Numbers of neighbouring queries whose keys are counted together."""
RECENT = (64, 256)
"""A key is recent if it is among this many last tokens, the query's own included."""
SEED = 0


def overlap(mask: Tensor, first: int, last: int) -> dict[str, float]:
    """Return how much the selections of neighbouring queries overlap, as means over queries ``first`` to ``last`` - 1.

    Args:
        mask: (bsz, queries, keys), true for the selected keys; query i is at the place of key i
        first, last: multiples of the largest of ``BLOCKS``

    Returns:
        "next": share of a query's keys that the next query selects too; "union n": different keys of n neighbours, in
        blocks that start at multiples of n, relative to those of one query; "recent n": share of keys that are recent.
    """
    rows = mask[:, first:last]
    selected = rows.sum(-1)  # (bsz, queries)
    both = (rows[:, :-1] & rows[:, 1:]).sum(-1)
    found = {"next": (both / selected[:, :-1]).mean()}
    for size in BLOCKS:
        union = rows.unflatten(1, (-1, size)).any(2).sum(-1)  # (bsz, blocks)
        found[f"union {size}"] = (union / selected.unflatten(1, (-1, size)).float().mean(-1)).mean()
    keys = torch.arange(mask.shape[-1], device=mask.device)
    distance = keys[first:last, None] - keys
    for size in RECENT:
        found[f"recent {size}"] = ((rows & (distance < size)).sum(-1) / selected).mean()
    return {name: value.item() for name, value in found.items()}


def ranges(topk: int, seq_len: int) -> dict[str, tuple[int, int]]:
    """Return the measured ranges of queries: all that see more than ``topk`` keys, and by how many they see."""
    found = {"all": (topk, seq_len)}
    factor = 1
    while factor * topk < seq_len:
        found[f"{factor} to {2 * factor} × top-k"] = (factor * topk, min(2 * factor * topk, seq_len))
        factor *= 2
    return found


def random_mask(seq_len: int, topk: int, device: torch.device) -> Tensor:
    """Return random selections of ``topk`` visible keys, (1, seq_len, seq_len)."""
    from torchtitan_npu.layers.sparse_attention import select

    generator = torch.Generator(device).manual_seed(SEED)
    scores = torch.rand(1, seq_len, seq_len, generator=generator, device=device)
    return select(scores, torch.ones_like(scores, dtype=torch.bool).tril(), topk)


def pieces_of(folder: Path) -> list[str]:
    """Return the text of the files in ``folder`` in pieces, in random order."""
    pieces: list[str] = []
    for file in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        pieces += [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    random.Random(SEED).shuffle(pieces)
    return pieces


class Texts:
    """Training text, tokenizer and held-out sequences, written to ``folder``."""

    def __init__(self, sources: list[Path], characters: int, vocab_size: int, seq_len: int, folder: Path) -> None:
        self.corpus, self.tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
        kinds = {source.name: pieces_of(source) for source in sources}
        tokenizer_texts = [piece for pieces in kinds.values() for piece in limited(pieces, 4_000_000)]
        self.tokenizer.mkdir()
        (self.tokenizer / "tokenizer.json").write_text(train_tokenizer(tokenizer_texts, vocab_size))
        (self.tokenizer / "tokenizer_config.json").write_text(tokenizer_config())

        from torchtitan.components.tokenizer import HuggingFaceTokenizer

        tokenizer = HuggingFaceTokenizer(str(self.tokenizer))
        self.held_out: dict[str, Tensor] = {}
        """Tokens by kind of text, (HELD_OUT, seq_len + 1)."""
        training: list[str] = []
        for kind, pieces in kinds.items():
            rows: list[list[int]] = []
            rest: list[str] = []
            for piece in pieces:
                tokens = tokenizer.encode(piece) if len(rows) < HELD_OUT and len(piece) > seq_len else []
                if len(tokens) > seq_len:
                    rows.append(tokens[: seq_len + 1])
                else:
                    rest.append(piece)
            if len(rows) < HELD_OUT:
                raise SystemExit(f"{kind}: fewer than {HELD_OUT} pieces of text have {seq_len} tokens")
            self.held_out[kind] = torch.tensor(rows)
            chosen = list(limited(rest, characters // len(kinds)))
            print(f"{kind}: {sum(map(len, chosen)) / 1e6:.1f} million characters in {len(chosen)} pieces")
            training += chosen
        random.Random(SEED).shuffle(training)
        self.corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in training))


def limited(texts: list[str], characters: int) -> Iterator[str]:
    """Yield the first of ``texts``, up to the one that exceeds ``characters`` in total."""
    total = 0
    for text in texts:
        if total > characters:
            return
        total += len(text)
        yield text


def job(texts: Texts, args: argparse.Namespace) -> list[str]:
    """Return the arguments of the training job."""
    arguments = ["--job.config_file", str(CONFIGS / "deepseek_v32_debugmodel.toml"), *ONE_RANK]
    arguments += ["--model.converters", "npu_dsa", "--model.hf_assets_path", str(texts.tokenizer)]
    arguments += ["--training.dataset_path", str(texts.corpus), "--training.seq_len", str(args.seq_len)]
    arguments += ["--training.local_batch_size", str(args.batch), "--training.global_batch_size", str(args.batch)]
    arguments += ["--training.steps", str(args.dense_steps + args.sparse_steps), "--debug.seed", str(SEED)]
    arguments += ["--lr_scheduler.warmup_steps", str(1 + args.dense_steps // 4), "--metrics.log_freq", "100"]
    return arguments


def sparse_attentions(model: torch.nn.Module) -> list[Any]:
    from torchtitan_npu.layers.sparse_attention import SparseAttention

    return [module for module in model.modules() if isinstance(module, SparseAttention)]


def train(trainer: Any, batches: Iterator[Any], steps: int, topk: int, seconds: float) -> None:
    """Train for ``steps`` steps or ``seconds``, in which a query selects ``topk`` keys."""
    from torchtitan_npu.components.metrics import step_means

    for attention in sparse_attentions(trainer.model_parts[0]):
        attention.topk = topk
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        trainer.step += 1
        trainer.train_step(batches)
        spent = time.perf_counter() - begin
        last = step == steps or spent > seconds
        if last or step % 25 == 1:  # reading the loss waits for the device
            loss = step_means(trainer.auxiliary_losses, trainer.parallel_dims)["indexer_loss"]
            print(f"top-k {topk}, step {step}: indexer loss {loss:.4f}, {spent:.1f} s", flush=True)
        if last:
            return


@torch.no_grad()
def selections(trainer: Any, tokens: Tensor, topk: int) -> tuple[list[Tensor], float]:
    """Return the selected keys of each layer, (1, seq_len, seq_len), and the next-token loss of ``tokens``."""
    from torchtitan_npu.layers.sparse_attention import mask_of

    model, masks = trainer.model_parts[0], []
    attentions = sparse_attentions(model)
    handles = [
        attention.register_forward_hook(lambda _, __, output: masks.append(mask_of(output[1], len(tokens) - 1)))
        for attention in attentions
    ]
    for attention in attentions:
        attention.topk, attention.returns_selected = topk, True
    with trainer.maybe_enable_amp:
        logits = model(tokens[None, :-1])
    for attention, handle in zip(attentions, handles, strict=True):
        attention.returns_selected = False
        handle.remove()
    return masks, cross_entropy(logits[0].float(), tokens[1:]).item()


def measure(trainer: Any, texts: Texts, topk: int, state: str) -> list[dict[str, Any]]:
    """Return a row for each kind of text, layer and range, and print the loss of the held-out text."""
    rows: list[dict[str, Any]] = []
    for kind, sequences in texts.held_out.items():
        losses: list[float] = []
        by_layer: list[list[Tensor]] = []
        for tokens in sequences:
            masks, loss = selections(trainer, tokens.to(trainer.device), topk)
            by_layer.append(masks)
            losses.append(loss)
        print(f"{state}, {kind}: loss {sum(losses) / len(losses):.3f}", flush=True)
        for layer, masks_of_layer in enumerate(zip(*by_layer, strict=True)):
            mask = torch.cat(masks_of_layer)
            for name, (first, last) in ranges(topk, mask.shape[1]).items():
                rows.append({"state": state, "text": kind, "layer": layer, "range": name, **overlap(mask, first, last)})
    return rows


def means(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], dict[str, float]]:
    """Return the means of the measured numbers over the rows that are equal in ``keys``."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {
        group: {name: sum(row[name] for row in members) / len(members) for name in names}
        for group, members in groups.items()
    }


def table(groups: dict[tuple[Any, ...], dict[str, float]], *keys: str) -> str:
    """Return a Markdown table of :func:`means`: shares as percentages, unions as multiples of one query's keys."""
    names = list(next(iter(groups.values())))
    text = ["| " + " | ".join([*keys, *names]) + " |", "|" + "---|" * (len(keys) + len(names))]
    for group, numbers in groups.items():
        values = [f"{value:.2f}" if name.startswith("union") else f"{value:.0%}" for name, value in numbers.items()]
        text.append("| " + " | ".join([*map(str, group), *values]) + " |")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument("--characters", type=int, default=40_000_000, help="of training text, in all")
    parser.add_argument("--dense-steps", type=int, default=150)
    parser.add_argument("--sparse-steps", type=int, default=800)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--topk", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit of training")
    parser.add_argument("--tiny", action="store_true")
    args, options = parser.parse_known_args()
    if args.topk % max(BLOCKS) or args.seq_len % max(BLOCKS):
        parser.error(f"--topk and --seq-len must be multiples of {max(BLOCKS)}, the largest block of queries")
    os.environ.update(rank_environment())

    from torchtitan_npu import platform

    platform.prepare()
    from torchtitan_npu.models.deepseek_v32 import deepseekv32_args

    sizes: dict[str, Any] = {"index_topk": args.topk, "n_dense_layers": 6}
    if not args.tiny:
        sizes |= {"vocab_size": 8192, "dim": 768, "inter_dim": 2048}
        sizes |= {"n_heads": 16, "q_lora_rank": 384, "index_n_heads": 16}
    flavor = deepseekv32_args["debugmodel" if args.tiny else "debugmodel_npu"]
    deepseekv32_args["debugmodel"] = flavor = replace(flavor, **sizes)

    with tempfile.TemporaryDirectory() as folder:
        texts = Texts(args.text, args.characters, flavor.vocab_size, args.seq_len, Path(folder))
        with trainer_of([*job(texts, args), *options]) as trainer:
            batches = trainer.batch_generator(trainer.dataloader)
            rows = measure(trainer, texts, args.topk, "untrained")
            train(trainer, batches, args.dense_steps, args.seq_len, args.seconds / 3)
            rows += measure(trainer, texts, args.topk, "after dense steps")
            train(trainer, batches, args.sparse_steps, args.topk, args.seconds * 2 / 3)
            rows += measure(trainer, texts, args.topk, "trained")
            device = trainer.device
    mask = random_mask(args.seq_len, args.topk, device)
    for name, (first, last) in ranges(args.topk, args.seq_len).items():
        rows.append({"state": "random", "text": "", "layer": "", "range": name, **overlap(mask, first, last)})

    of_all = [row for row in rows if row["range"] == "all"]
    trained = [row for row in of_all if row["state"] == "trained"]
    for some, keys in ((trained, ("layer",)), (of_all, ("state", "text")), (rows, ("state", "range"))):
        print(f"\n{table(means(some, *keys), *keys)}")
    print(f"\n{machine(device.type)}, torch {torch.__version__}, {args.seq_len} tokens, top-k {args.topk}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
