"""The files beside the weights that make an export a folder for transformers: config, tokenizer, generation config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from torchtitan_npu.errors import UsageError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
COPIED = (
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
CONTEXT = "max_position_embeddings"


def write_model_files(folder: Path, config: dict[str, Any] | None, assets: Path | None, dtype: torch.dtype) -> None:
    """Write ``config.json`` and ``generation_config.json`` and copy the tokenizer's files from ``assets``.

    ``config`` has the model's fields (:mod:`torchtitan_npu.models.hugging_face_config`). Token ids and context length
    come from the config of ``assets``, or the ids from its tokenizer. Without ``config`` only files are copied.
    """
    released, tokens = read_assets(assets) if assets else ({}, {})
    if assets:
        for name in COPIED:
            if (assets / name).is_file():
                shutil.copyfile(assets / name, folder / name)
    if config is None:
        return
    config = {**config, **tokens, "dtype": str(dtype).removeprefix("torch.")}
    for of_job, of_release in ((config, released), (config.get("text_config", {}), released.get("text_config", {}))):
        if CONTEXT in of_job and isinstance(of_release.get(CONTEXT), int):
            of_job[CONTEXT] = of_release[CONTEXT]
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if not (folder / GENERATION_CONFIG).exists():
        generation = {"_from_model_config": True, **tokens}
        (folder / GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n")


def read_assets(assets: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config in the folder ``assets``, empty if there is none, and the ids of special tokens.

    Raise :class:`UsageError` for a file that is not JSON.
    """
    released = _read(assets / CONFIG)
    if released:
        return released, {key: released[key] for key in TOKENS if released.get(key) is not None}
    added = _read(assets / "tokenizer.json").get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in added}
    names = _read(assets / "tokenizer_config.json")
    texts = {key: names.get(key.removesuffix("_id")) for key in TOKENS}
    texts = {key: text["content"] if isinstance(text, dict) else text for key, text in texts.items()}
    return {}, {key: ids[text] for key, text in texts.items() if text in ids}


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON or of UTF-8
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} has no JSON object")
    return found
