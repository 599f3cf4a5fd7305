"""A model of this package for lm-evaluation-harness, which has the tasks. It needs the extra ``eval``."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from torchtitan_npu.cli.inference.generation import Sampling, generate
from torchtitan_npu.cli.inference.loading import InferenceModel
from torchtitan_npu.cli.inference.scoring import score, windows
from torchtitan_npu.errors import UsageError, did_you_mean
from torchtitan_npu.progress import Progress

MAX_NEW_TOKENS = 256
"""Unless the task says how many."""


class HarnessModel(TemplateLM):
    """The harness's interface to an :class:`InferenceModel`. All ranks get all requests."""

    def __init__(self, model: InferenceModel, batch: int) -> None:
        super().__init__()
        self.model, self.batch = model, batch
        self.text: Any = model.tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.text.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.text.eos_id if self.text.bos_id is None else self.text.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        add_bos = self.text.default_add_bos if add_special_tokens is None else add_special_tokens
        return self.text.encode(string, add_bos=add_bos, add_eos=False)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        scores = score(self.model, [(context, continuation) for _, context, continuation in requests], self.batch)
        return [(one.total, one.is_greedy) for one in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = []
        for request in requests:
            tokens = [self.prefix_token_id, *self.tok_encode(request.args[0], add_special_tokens=False)]
            texts.append(list(windows(tokens, self.model.longest)))
        scores = iter(score(self.model, [pair for pairs in texts for pair in pairs], self.batch))
        return [sum(one.total for one in islice(scores, len(pairs))) for pairs in texts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts = []
        with Progress("evaluate: generating texts") as progress:
            for number, request in enumerate(requests):
                done = number / len(requests)
                progress.update(f"evaluate: generating text {number + 1} of {len(requests)}", done)
                texts.append(self._generate(*request.args))
        return texts

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        new = options.get("max_gen_toks", MAX_NEW_TOKENS)
        if new >= self.model.longest:
            raise UsageError(
                f"a task generates {new} tokens (max_gen_toks): training.seq_len is {self.model.longest}, and must be "
                "larger; choose it with --training.seq_len"
            )
        temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        # a prompt that is too long loses its beginning, as in the harness's models
        prompt = self.tok_encode(context)[new - self.model.longest :]
        sampling = Sampling(new, temperature, options.get("top_p", 1.0))
        text = self.text.decode(generate(self.model, [prompt], sampling).tokens[0])
        until = options.get("until") or []
        for end in [until] if isinstance(until, str) else until:
            text = text.split(end)[0] if end else text
        return text


def run_tasks(
    model: InferenceModel, names: list[str], folder: Path | None, limit: int | None, batch: int
) -> dict[str, dict[str, Any]]:
    """Return the results of the harness's tasks by name. ``folder`` has further tasks as YAML files."""
    tasks = TaskManager(include_path=str(folder) if folder else None, include_defaults=folder is None)
    if unknown := [name for name in names if name not in tasks.all_tasks]:
        raise UsageError(f"--tasks {unknown[0]} is unknown{did_you_mean(unknown[0], tasks.all_tasks)}")
    found: Any = simple_evaluate(HarnessModel(model, batch), tasks=names, limit=limit, task_manager=tasks)
    return found["results"]
