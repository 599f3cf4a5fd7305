"""Each hook finds the call that it replaces. One that does not returns TorchTitan's function itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import build_optimizers, build_optimizers_with_moe_load_balancing
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.llama3.infra.parallelize import parallelize_llama
from torchtitan.models.llama3.model.model import Attention, apply_rotary_emb
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.titan_internals import hooks
from torchtitan_npu.titan_internals.rebind import refers_to


def replacement(*args: Any) -> None: ...


HOOKS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "tensor parallel of deepseek_v3": (
        parallelize_deepseekv3,
        lambda f: hooks.with_tensor_parallel(f, replacement),
    ),
    "tensor parallel of qwen3": (parallelize_qwen3, lambda f: hooks.with_tensor_parallel(f, replacement)),
    "checkpointing": (parallelize_qwen3, lambda f: hooks.with_activation_checkpoint(f, replacement)),
    "compile": (parallelize_deepseekv3, lambda f: hooks.with_compile(f, replacement)),
    "FSDP": (parallelize_qwen3, lambda f: hooks.with_fsdp(f, replacement)),
    "experts": (parallelize_deepseekv3, lambda f: hooks.with_moe_parallel(f, replacement)),
    "expert styles": (
        parallelize_deepseekv3,
        lambda f: hooks.with_expert_parallel_styles(f, {ExpertParallel: replacement}),  # type: ignore[dict-item]
    ),
    "reorderer style": (parallelize_deepseekv3, lambda f: hooks.with_reorderer_style(f, replacement)),  # type: ignore[arg-type]
    "checkpoint wrapper": (parallelize_deepseekv3, lambda f: hooks.with_checkpoint_wrapper(f, replacement)),
    "pipeline stage": (pipeline_llm, lambda f: hooks.with_pipeline_stage(f, replacement)),  # type: ignore[arg-type]
    "optimizers": (build_optimizers, lambda f: hooks.with_optimizers_container(f, replacement)),
    "dispatch": (ExpertParallel._token_dispatch, lambda _: hooks.token_dispatch_with(replacement)),
    "combine": (ExpertParallel._token_combine, lambda _: hooks.token_combine_with(replacement)),
    "rotations": (Attention.forward, lambda f: hooks.with_rotations(f, {apply_rotary_emb: replacement})),
}


@pytest.mark.parametrize("name", HOOKS)
def test_the_call_is_replaced_in_a_copy(name: str) -> None:
    function, hook = HOOKS[name]
    copy = hook(function)
    assert copy is not function
    assert refers_to(copy, [replacement]) and not refers_to(function, [replacement])


def test_the_last_call_before_the_update_and_those_of_dcp_are_replaced() -> None:
    step: Any = hooks.train_step_with(replacement)
    assert step.__globals__["dist_utils"].clip_grad_norm_ is replacement
    calls = [hooks.dcp, hooks.consolidate_safetensors_files_on_every_rank]
    assert len(refers_to(CheckpointManager.dcp_save, calls)) == 2
    assert not refers_to(hooks.saving_in(CheckpointManager.dcp_save, None), calls)
    load: Any = hooks.loading_in(CheckpointManager.dcp_load, "group")
    assert load.__globals__["dcp"].load.keywords == {"process_group": "group"}


def test_which_plans_have_experts() -> None:
    assert hooks.calls_moe_parallel(parallelize_deepseekv3) and not hooks.calls_moe_parallel(parallelize_llama)


def test_torchtitans_context_parallel_is_not_applied() -> None:
    assert hooks.without_attention_context_parallel(parallelize_deepseekv3) is not parallelize_deepseekv3


def test_experts_are_balanced_by_the_given_builder() -> None:
    ours: Any = replacement
    assert hooks.with_expert_balancing(build_optimizers_with_moe_load_balancing, ours) is ours
    assert hooks.with_expert_balancing(build_optimizers, ours) is build_optimizers
    assert get_train_spec("simple_fsdp.deepseek_v3").build_optimizers_fn is build_optimizers_with_moe_load_balancing
