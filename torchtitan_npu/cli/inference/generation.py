"""Generate text token by token: greedy, or sampled with a temperature from the most probable tokens (top-p).

The benchmark measures the speed, and checks that the tokens were really generated one by one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_npu.cli.inference.loading import InferenceModel
from torchtitan_npu.errors import UsageError
from torchtitan_npu.progress import Progress


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    """0 chooses the most probable token."""
    top_p: float = 1.0
    """Choose among the most probable tokens whose probabilities sum up to this."""
    seed: int = 0
    """Each prompt has a random generator, so that its text does not depend on the other prompts of a batch."""
    stops_at_eos: bool = True

    def choose(self, logits: Tensor, generators: list[torch.Generator]) -> Tensor:
        """Return the next tokens (bsz) from ``logits`` (bsz, vocab_size) on the CPU."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        probabilities = (logits.double() / self.temperature).softmax(dim=-1)
        ordered, token = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= self.top_p, 0)  # the first token always stays
        drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(ordered, generators, strict=True)]
        return token.gather(-1, torch.stack(drawn)).squeeze(-1)


@dataclass
class Generated:
    """The new tokens of each prompt, and the seconds that they took."""

    tokens: list[list[int]]
    prefill_s: float = 0.0
    """Until the first token of every row."""
    decode_s: list[float] = field(default_factory=list)
    """For each later token of all rows."""


def generate(
    model: InferenceModel,
    prompts: list[list[int]],
    sampling: Sampling,
    first: int = 0,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> Generated:
    """Continue each of ``prompts``, and show the number of tokens in ``progress``. All ranks return the same tokens.

    ``first`` is the number of the first prompt, for its random numbers. Without the cache, each token is computed from
    the complete text before it.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    check_lengths(model, lengths, sampling)
    padding = [longest - length for length in lengths]
    rows = torch.tensor([[0] * blanks + prompt for blanks, prompt in zip(padding, prompts, strict=True)])
    generators = [torch.Generator().manual_seed(sampling.seed + first + row) for row in range(len(prompts))]
    eos = model.tokenizer.eos_id if sampling.stops_at_eos else None
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    result = Generated([])
    clock = time.perf_counter()
    for step in range(sampling.max_new_tokens):
        start = rows.shape[1] - 1 if use_cache and step else 0
        logits = model.logits(rows, start, padding, only_last=True)[:, -1].cpu()
        chosen = on_every_rank(sampling.choose(logits, generators), model.device)
        rows = torch.cat([rows, chosen.unsqueeze(1)], dim=1)
        now = time.perf_counter()
        if step:
            result.decode_s.append(now - clock)
        else:
            result.prefill_s = now - clock
        clock = now
        if progress:
            done = f"{step + 1} of {sampling.max_new_tokens} tokens"
            progress.update(f"generate: continuing prompt {first + 1}, {done}", (step + 1) / sampling.max_new_tokens)
        if eos is not None:
            ended |= chosen == eos
            if ended.all():
                break
    result.tokens = [until(row[longest:].tolist(), eos) for row in rows]
    return result


def check_lengths(model: InferenceModel, lengths: list[int], sampling: Sampling) -> None:
    """Raise :class:`UsageError` if a prompt is empty, or its text would be longer than the model's sequences."""
    if min(lengths) == 0:
        raise UsageError("a prompt has no tokens; the tokenizer adds none at the beginning")
    if max(lengths) + sampling.max_new_tokens > model.longest:
        raise UsageError(
            f"a prompt of {max(lengths)} tokens and --max-new-tokens {sampling.max_new_tokens} are more than the "
            f"{model.longest} tokens of training.seq_len"
        )


def on_every_rank(tokens: Tensor, device: torch.device) -> Tensor:
    """Return rank 0's ``tokens``: the last bits of the logits may differ between ranks."""
    if not dist.is_initialized():
        return tokens
    sent = tokens.to(device)
    dist.broadcast(sent, src=0)
    return sent.cpu()


def until(tokens: list[int], eos: int | None) -> list[int]:
    """Return ``tokens`` up to the first ``eos``, without it."""
    return tokens[: tokens.index(eos)] if eos in tokens else tokens


REPEATED = 8
"""So many equal tokens at the end of a text are reported."""


class InvalidBenchmark(Exception):
    """The measurement does not count, for the reason that the message gives."""


def benchmark(model: InferenceModel, prompts: list[list[int]], sampling: Sampling) -> str:
    """Generate once to warm up and once to measure. Return one line, or raise :class:`InvalidBenchmark`."""
    # an end of text would make rows shorter than asked for
    sampling = replace(sampling, stops_at_eos=False)
    vocabulary = model.args.vocab_size
    changed = [[(token + 1) % vocabulary for token in prompt] for prompt in prompts]
    warm_up = generate(model, changed, sampling)
    counts: list[int] = []
    counter = model.model.register_forward_pre_hook(lambda _, args: counts.append(args[0].shape[1]))
    measured = generate(model, prompts, sampling)
    counter.remove()
    check_forwards(counts, max(map(len, prompts)), sampling.max_new_tokens, model.dims.tp)
    lengths = {len(row) for row in (*warm_up.tokens, *measured.tokens)}
    if lengths != {sampling.max_new_tokens}:
        raise InvalidBenchmark(f"rows have {sorted(lengths)} new tokens, not {sampling.max_new_tokens}")
    if sampling.temperature == 0:
        check_tokens(model, prompts, measured)
    return line(prompts, measured, sampling)


def check_forwards(tokens: list[int], longest: int, new: int, tp: int) -> None:
    """Raise unless the model ran once over the prompts and then once for each further token."""
    expected = [longest + -longest % tp] + [tp] * (new - 1)
    if tokens != expected:
        raise InvalidBenchmark(f"the model ran over {tokens[:8]} tokens; one by one these are {expected[:8]}")


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
            raise InvalidBenchmark(f"token {position + 1} of a row is not the most probable one without the cache")


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
