"""Run the assembly of Gluon kernels on a CPU: the few PTX instructions that they use, for the four warps of a group."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import torch
from torch import Tensor

WARPS, LANES = 4, 32
INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov.f32": lambda x: x,
    "neg.f32": torch.neg,
    "add.f32": torch.add,
    "sub.f32": torch.sub,
    "mul.f32": torch.mul,
    "max.f32": torch.fmax,
    "fma.rn.f32": lambda x, y, z: (x.double() * y.double() + z.double()).float(),
    "ex2.approx.ftz.f32": torch.exp2,
    "setp.eq.f32": torch.eq,
    "setp.neu.f32": torch.ne,
    "setp.neu.or.f32": lambda x, y, or_: (x != y) | or_,
    "setp.gt.f32": torch.gt,
    "setp.gt.or.f32": lambda x, y, or_: (x > y) | or_,
    "selp.f32": lambda x, y, chosen: torch.where(chosen, x, y),
    "vote.sync.any.pred": lambda x, lanes: x.any(-1, keepdim=True).expand_as(x),
    "shfl.sync.bfly.b32": lambda x, distance, clamp, lanes: x[:, torch.arange(LANES) ^ int(distance[0, 0])],
}


def run(assembly: str, constraints: str, values: list[Tensor], pack: int) -> Tensor:
    """Return what ``inline_asm_elementwise`` computes for blocks of an accumulator, as their threads have them.

    Blocks are (64 heads, 4 threads) or (64 heads, eights of columns, 4 threads, 2 columns). A missing early clobber (&)
    has no effect here.
    """
    outputs = constraints.count("=")
    blocks = torch.broadcast_tensors(*values)
    operands = [torch.full((WARPS, LANES), torch.nan) for _ in range(outputs)]
    for block in blocks:
        operands += _numbers_of_threads(block)
    names = constraints.split(",")
    assert len(names) == len(operands) and outputs == pack
    for number, name in enumerate(names):
        if name.isdigit():  # an input in the register of an output
            operands[int(name)] = operands[number]
    registers = {f"${number}": value for number, value in enumerate(operands) if not names[number].isdigit()}
    _execute(assembly, registers)
    return _block([registers[f"${number}"] for number in range(outputs)], blocks[0].shape)


def _numbers_of_threads(block: Tensor) -> list[Tensor]:
    """Return what each thread has, in its order of registers: (warps, lanes) for each number."""
    split = block.reshape(WARPS, 2, 8, -1, 4, 2 if block.dim() == 4 else 1)  # warps, head or eight below, heads, ...
    return list(split.permute(3, 1, 5, 0, 2, 4).reshape(-1, WARPS, LANES))


def _block(numbers: list[Tensor], shape: torch.Size) -> Tensor:
    """Return the block of which :func:`_numbers_of_threads` are ``numbers``."""
    columns = 2 if len(shape) == 4 else 1
    split = torch.stack(numbers).reshape(-1, 2, columns, WARPS, 8, 4)
    return split.permute(3, 1, 4, 0, 5, 2).reshape(shape)


def _execute(assembly: str, registers: dict[str, Tensor]) -> None:
    """Execute the instructions up to the end. Warps whose lanes all branch skip those up to the label DONE."""
    body = re.fullmatch(r"\{(.*) DONE: \}", assembly)
    assert body is not None
    active = torch.ones(WARPS, LANES, dtype=torch.bool)
    for instruction in filter(None, map(str.strip, body[1].split(";"))):
        if instruction.startswith(".reg "):
            continue
        if branch := re.fullmatch(r"@!(%\w+) bra\.uni DONE", instruction):
            stays = registers[branch[1]]
            assert torch.equal(stays, stays[:, :1].expand_as(stays))  # otherwise bra.uni is not defined
            active = active & stays
            continue
        name, _, arguments = instruction.partition(" ")
        target, *sources = map(str.strip, arguments.split(","))
        result = INSTRUCTIONS[name](*(registers[x] if x in registers else _number(x) for x in sources))
        registers[target] = torch.where(active, result, registers.get(target, torch.zeros_like(result)))


def _number(text: str) -> Tensor:
    if text.startswith("0f"):
        (value,) = struct.unpack(">f", bytes.fromhex(text[2:]))
    else:
        value = float(int(text, 0)) if text.startswith("0x") or text.isdigit() else float(text)
    return torch.full((WARPS, LANES), value)
