"""Random DeepSeek-V3.2 checkpoints in the released format, with multi-token prediction and FP8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests._helpers.deepseek_v32_models import build, model_args
from torchtitan_npu.models.deepseek_v32 import DeepSeekV32ModelArgs, DeepSeekV32StateDictAdapter

INDEX = "model.safetensors.index.json"
QUANTISED = ("_proj.weight", "_with_mqa.weight", "wq_b.weight", "wk.weight")


def mtp_args(depths: int, **changes: Any) -> DeepSeekV32ModelArgs:
    args = model_args(**changes)
    args.n_mtp_layers = depths
    return args


def exported(args: DeepSeekV32ModelArgs) -> dict[str, Tensor]:
    """Return random weights in the released format."""
    weights = DeepSeekV32StateDictAdapter(args, None).to_hf(build(args).state_dict())
    return {name: value.clone() for name, value in weights.items()}


def write(weights: dict[str, Tensor], folder: Path, files: int = 1) -> None:
    """Write ``weights`` as safetensors files with an index."""
    names = [f"model-{number:05d}-of-{files:06d}.safetensors" for number in range(1, files + 1)]
    weight_map = {name: names[number % files] for number, name in enumerate(weights)}
    for file in names:
        save_file({name: value for name, value in weights.items() if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def read_back(folder: Path) -> dict[str, Tensor]:
    """Read the weights that :func:`write` wrote."""
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def quantised(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Write other weights of these names in FP8, in blocks of 128 × 128, and return the dequantised weights.

    Embedding, norms and routers, which the release does not quantise, stay as in ``weights``.
    """
    generator = torch.Generator().manual_seed(0)
    files, expected = dict(weights), dict(weights)
    for name, value in weights.items():
        if not name.endswith(QUANTISED) or "weights_proj" in name or "eh_proj" in name:
            continue
        files[name] = torch.randn(value.shape, generator=generator).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in value.shape]
        scales = files[f"{name}_scale_inv"] = torch.rand(blocks, generator=generator) + 0.5
        expected[name] = files[name].float()
        for row in range(blocks[0]):
            for column in range(blocks[1]):
                block = expected[name][row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
                block *= scales[row, column]
    return files, expected
