"""Each hook finds the call that it replaces. One that does not returns TorchTitan's function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torchtitan.components.optimizer import build_optimizers, build_optimizers_with_moe_load_balancing
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.deepseek_v3.infra.parallelize import apply_fsdp, parallelize_deepseekv3
from torchtitan.models.llama3.model.model import Attention, apply_rotary_emb
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.upstream import hooks
from torchtitan_npu.upstream.rebind import refers_to


def replacement(*args: Any) -> None: ...


HOOKS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "steps": (parallelize_deepseekv3, lambda f: hooks.with_steps(f, {apply_fsdp: replacement})),
    "checkpoint wrapper": (parallelize_deepseekv3, lambda f: hooks.with_checkpoint_wrapper(f, replacement)),
    "pipeline stage": (pipeline_llm, lambda f: hooks.with_pipeline_stage(f, replacement)),  # type: ignore[arg-type]
    "optimizers": (build_optimizers, lambda f: hooks.with_optimizers_container(f, replacement)),
    "dispatch": (ExpertParallel._token_dispatch, lambda _: hooks.token_dispatch_with(replacement)),
    "combine": (ExpertParallel._token_combine, lambda _: hooks.token_combine_with(replacement)),
    "functions": (Attention.forward, lambda f: hooks.with_functions(f, {apply_rotary_emb: replacement})),
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_call_is_replaced_in_a_copy(name: str) -> None:
    function, hook = HOOKS[name]
    copy = hook(function)
    assert copy is not function
    assert refers_to(copy, [replacement]) and not refers_to(function, [replacement])


def test_torchtitans_context_parallel_is_not_applied() -> None:
    assert hooks.without_attention_context_parallel(parallelize_deepseekv3) is not parallelize_deepseekv3


def test_experts_are_balanced_by_the_given_builder() -> None:
    ours: Any = replacement
    assert hooks.with_expert_balancing(build_optimizers_with_moe_load_balancing, ours) is ours
    assert hooks.with_expert_balancing(build_optimizers, ours) is build_optimizers
    assert get_train_spec("simple_fsdp.deepseek_v3").build_optimizers_fn is build_optimizers_with_moe_load_balancing
