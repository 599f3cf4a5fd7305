"""Measure the speed of generation, and check that the tokens were really generated one by one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from torchtitan_npu.cli.generate.generation import Generated, Sampling, generate
from torchtitan_npu.cli.generate.loading import InferenceModel

REPEATED = 8
"""So many equal tokens at the end of a text are reported."""


class Refused(Exception):
    """The measurement does not count, for the reason that the message gives."""


class ForwardCounter:
    """A forward hook that counts calls of the model and the tokens of each."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tokens: list[int] = []
        self.handle = model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, model: torch.nn.Module, args: tuple[Tensor, ...], kwargs: object) -> None:
        self.tokens.append(args[0].shape[1])


def benchmark(model: InferenceModel, prompts: list[list[int]], sampling: Sampling) -> str:
    """Generate once to warm up and once to measure. Return one line, or raise :class:`Refused`."""
    # an end of text would make rows shorter than asked for
    sampling = replace(sampling, stops_at_eos=False)
    vocabulary = model.args.vocab_size
    others = [[(token + 1) % vocabulary for token in prompt] for prompt in prompts]
    warm_up = generate(model, others, sampling)
    counter = ForwardCounter(model.model)
    measured = generate(model, prompts, sampling)
    counter.handle.remove()
    check_forwards(counter.tokens, max(map(len, prompts)), sampling.max_new_tokens, model.dims.tp)
    check_lengths(measured, sampling.max_new_tokens)
    check_lengths(warm_up, sampling.max_new_tokens)
    if sampling.temperature == 0:
        check_tokens(model, prompts, measured)
    return line(prompts, measured, sampling)


def check_forwards(tokens: list[int], longest: int, new: int, tp: int) -> None:
    """Raise unless the model ran once over the prompts and then once for each further token."""
    expected = [longest + -longest % tp] + [tp] * (new - 1)
    if tokens != expected:
        raise Refused(f"the model ran over {tokens[:8]} tokens; one by one these are {expected[:8]}")


def check_lengths(measured: Generated, new: int) -> None:
    """Raise unless each row has as many new tokens as asked for."""
    lengths = {len(row) for row in measured.tokens}
    if lengths != {new}:
        raise Refused(f"rows have {sorted(lengths)} new tokens, not {new}")


def check_tokens(model: InferenceModel, prompts: list[list[int]], measured: Generated) -> None:
    """Raise unless each token is the most probable one in a forward pass over the complete text, without the cache.

    Two logits may be closer than their rounding errors. Then the other token is accepted.
    """
    for prompt, new in zip(prompts, measured.tokens, strict=True):
        logits = model.logits(torch.tensor([prompt + new]))[0, len(prompt) - 1 : -1].cpu()
        gap = logits.amax(dim=-1) - logits.gather(-1, torch.tensor(new).unsqueeze(-1)).squeeze(-1)
        allowed = logits.abs().amax() * (2**-14 if model.dtype == "float32" else 2**-4)
        if (gap > allowed).any():
            position = int((gap > allowed).nonzero()[0])
            raise Refused(f"token {position + 1} of a row is not the most probable one without the cache")


def line(prompts: list[list[int]], measured: Generated, sampling: Sampling) -> str:
    """Return the measured times and rates."""
    rows, decode = len(prompts), sum(measured.decode_s)
    prompt_tokens = sum(map(len, prompts))
    text = (
        f"{rows} rows, {prompt_tokens} prompt tokens, {sampling.max_new_tokens} new tokens each: prefill "
        f"{measured.prefill_s * 1e3:.1f} ms ({prompt_tokens / measured.prefill_s:.1f} tokens/s)"
    )
    if measured.decode_s:
        rate = rows * len(measured.decode_s) / decode
        text += f", decode {decode / len(measured.decode_s) * 1e3:.2f} ms per token ({rate:.1f} tokens/s)"
    repeated = sum(len(row) >= REPEATED and len(set(row[-REPEATED:])) == 1 for row in measured.tokens)
    return text + (f"; {repeated} rows end with {REPEATED} equal tokens" if repeated else "")
