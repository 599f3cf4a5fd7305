"""What a MoE layer sends under tensor and expert parallel, in TorchTitan's layout and in ours.

``python tools/bench/moe_traffic.py`` counts it on fake tensors of real sizes, as one of 64 ranks that exist in name
only, and writes the table into docs/moe-tensor-parallel.md.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from torchtitan_npu import platform, register

platform.prepare()

from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp  # noqa: E402
from torchtitan.models.moe.moe import MoE  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from torchtitan_npu.distributed.moe_gradients import mend_moe_gradients  # noqa: E402
from torchtitan_npu.distributed.moe_tensor_parallel import with_own_tokens  # noqa: E402
from torchtitan_npu.rehearsal import BelowSubclasses, StatedLoad, fake_device, fake_ranks  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "moe-tensor-parallel.md"
START, END = "<!-- made by tools/bench/moe_traffic.py -->\n", "<!-- end -->\n"

RANKS, TP, BATCH, SEQUENCE = 64, 4, 1, 4096
MODELS = {"deepseek_v3": "671B", "qwen3": "235B-A22B"}
MIB = 2**20

Key = tuple[str, str]
"""A collective's kind and its group."""


class Traffic(BelowSubclasses):
    """Counts collectives, and the bytes that a rank sends in them, by kind and group."""

    def __init__(self, groups: dict[str, str]) -> None:
        """``groups``: what to call a process group, by its own name."""
        super().__init__()
        self.groups = groups
        self.calls: Counter[Key] = Counter()
        self.sent: Counter[Key] = Counter()
        self.largest = 0
        """Bytes of the largest tensor that any operator gave."""

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = op(*args, **kwargs)
        self.largest = max([self.largest, *(x.nbytes for x in tree_leaves(outputs) if isinstance(x, torch.Tensor))])
        kind = op._schema.name.partition("::")[2]
        if op.namespace == "_c10d_functional" and kind not in ("wait_tensor", "_wrap_tensor_autograd"):
            self._note(kind, args[0].nbytes, dist.distributed_c10d._resolve_process_group(args[-1]))
        return outputs

    def _note(self, kind: str, size: int, group: dist.ProcessGroup) -> None:
        """``size``: the bytes that a rank puts in. What goes to another rank goes there directly, or around a ring."""
        n = group.size()
        shares = {
            "all_gather_into_tensor": n - 1,
            "reduce_scatter_tensor": (n - 1) / n,
            "all_to_all_single": (n - 1) / n,
            "all_reduce": 2 * (n - 1) / n,
        }
        key = kind, self.groups[group.group_name]
        self.calls[key] += 1
        self.sent[key] += math.ceil(size * shares[kind])


class Model(nn.Module):
    """As much of a transformer as the plans look at: a block that is a MoE layer."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        block = nn.Module()
        block.moe, block.moe_enabled = moe, True  # type: ignore[assignment]
        self.layers = nn.ModuleDict({"0": block})


def parallelize(model: Model, tp: DeviceMesh, ep: DeviceMesh, ours: bool) -> None:
    """Give the layer one of the layouts; TorchTitan's with its gradients mended."""
    plan = with_own_tokens(_plan, apply_moe_ep_tp) if ours else _plan
    plan(model, tp, ep)
    if not ours:
        mend_moe_gradients(model, tp, tokens_are_split=True)


def _plan(model: Model, tp: DeviceMesh, ep: DeviceMesh) -> None:
    apply_moe_ep_tp(model, tp, ep, None, None)


def traffic(name: str, ours: bool) -> Traffic:
    """Of a layer of the model ``name``, forward and backward, for one micro-batch with an even load of the experts."""
    args: Any = get_train_spec(name).model_args[MODELS[name]]
    with fake_ranks(RANKS):
        ep = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        tp = init_device_mesh("cpu", (RANKS // TP, TP), mesh_dim_names=("dp", "tp"))["tp"]
        groups = {str(tp.get_group().group_name): "TP", str(ep.get_group().group_name): "EP"}
        with torch.device("meta"):
            moe = MoE(replace(args.moe_args, use_grouped_mm=False), args.dim, args.moe_inter_dim)
        for parameter in moe.parameters():
            parameter.data = parameter.data.bfloat16()
        parallelize(Model(moe), tp, ep, ours)
        with fake_device(), StatedLoad():
            moe.to_empty(device="cpu")
            x = torch.empty(BATCH, SEQUENCE // TP, args.dim, dtype=torch.bfloat16, requires_grad=True)
            with Traffic(groups) as counted:
                out = moe(DTensor.from_local(x, tp, [Shard(1)]))
                out.backward(torch.empty_like(out))
                for parameter in moe.parameters():
                    grad = parameter.grad
                    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
                        grad.redistribute(placements=parameter.placements)  # FSDP does, before it reduces gradients
    return counted


def table() -> str:
    """A row for each kind of collective in each group: how many, and MiB that a rank sends, in either layout."""
    lines = ["| layer | collective | group | TorchTitan's | MiB | ours | MiB |", f"|{'---|' * 7}"]
    for name, flavor in MODELS.items():
        layouts = [traffic(name, ours=False), traffic(name, ours=True)]
        for kind, group in sorted(layouts[0].calls | layouts[1].calls, key=lambda key: key[::-1]):
            cells = (f"{t.calls[kind, group]} | {t.sent[kind, group] / MIB:,.1f}" for t in layouts)
            lines.append(f"| {name} {flavor} | `{kind}` | {group} | {' | '.join(cells)} |")
        cells = (f" | {sum(sent for (_, group), sent in t.sent.items() if group == 'TP') / MIB:,.1f}" for t in layouts)
        lines.append(f"| {name} {flavor} | all | TP | {' | '.join(cells)} |")
        cells = (f" | {t.largest / MIB:,.0f}" for t in layouts)
        lines.append(f"| {name} {flavor} | largest tensor in memory | | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    register()
    logging.disable()
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + START + table() + END + after)


if __name__ == "__main__":
    main()
