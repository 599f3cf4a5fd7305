"""Pictures of coloured shapes with captions, drawn from a seed: image-text data that needs no download.

The datasets are ``shapes`` for training and ``shapes_validation``. A model with images gets pictures and captions
(:mod:`torchtitan_npu.train_specs.qwen3_vl_dataloader`), a text model gets the captions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from operator import itemgetter

import torch
from datasets import Dataset
from torch import Tensor
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

SEEDS = {"shapes": "training", "shapes_validation": "validation"}
COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.9, 0.9, 0.1),
    "purple": (0.6, 0.1, 0.7),
    "white": (1.0, 1.0, 1.0),
}
SHAPES = ("circle", "square", "triangle")
SIDES = {"left of": (0.0, 1.0), "right of": (0.0, -1.0), "above": (1.0, 0.0), "below": (-1.0, 0.0)}
"""Direction from the first to the second shape; down and right are positive."""
MOVES = {"left": (0.0, -1.0), "right": (0.0, 1.0), "up": (-1.0, 0.0), "down": (1.0, 0.0)}
SECONDS_PER_FRAME = 0.5


@dataclass(frozen=True)
class Picture:
    """An image, or a video if it has more than one frame."""

    frames: Tensor
    """(frames, 3, height, width), values from 0 to 1."""
    caption: str


Thing = tuple[str, float, float]
"""Colour and shape, and offsets down and right from the centre, -1 to 1."""


@dataclass(frozen=True)
class Scene:
    """The description of a picture, before it is drawn."""

    height: int
    width: int
    """Both in units."""
    frames: list[list[Thing]]
    caption: str


def make_scene(seed: str, frames_of_video: int) -> Scene:
    """Return the scene for ``seed``, with sides of 2 to 4 units. One in four is a video."""
    rng = random.Random(seed)
    is_video = rng.random() < 0.25
    height, width = (rng.randint(2, 3 if is_video else 4) for _ in range(2))
    first, second = (f"{colour} {rng.choice(SHAPES)}" for colour in rng.sample(list(COLOURS), 2))
    if is_video:
        move, (down, right) = rng.choice(list(MOVES.items()))
        offsets = torch.linspace(-0.6, 0.6, frames_of_video).tolist()
        frames = [[(first, offset * down, offset * right)] for offset in offsets]
        return Scene(height, width, frames, f"a {first} moves {move}.")
    if rng.random() < 0.5:
        return Scene(height, width, [[(first, 0.0, 0.0)]], f"a {first}.")
    side, (down, right) = rng.choice(list(SIDES.items()))
    both = [(first, -down / 2, -right / 2), (second, down / 2, right / 2)]
    return Scene(height, width, [both], f"a {first} {side} a {second}.")


def draw(seed: str, unit: int, frames_of_video: int) -> Picture:
    """Draw the scene for ``seed``, with ``unit`` pixels per unit."""
    scene = make_scene(seed, frames_of_video)
    frames = [_drawn(unit * scene.height, unit * scene.width, things) for things in scene.frames]
    return Picture(torch.stack(frames), scene.caption)


def _drawn(height: int, width: int, things: list[Thing]) -> Tensor:
    """Draw ``things`` on a dark picture (3, height, width)."""
    y = torch.linspace(-1, 1, height)[:, None]
    x = torch.linspace(-1, 1, width)[None, :]
    picture = torch.full((3, height, width), 0.1)
    for what, down, right in things:
        colour, shape = what.split()
        dy, dx = y - down, x - right
        inside = {
            "circle": dy**2 + dx**2 < 0.16,
            "square": torch.maximum(dy.abs(), dx.abs()) < 0.35,
            "triangle": (dy.abs() < 0.4) & (2 * dx.abs() < dy + 0.4),
        }[shape]
        picture = torch.where(inside, torch.tensor(COLOURS[colour])[:, None, None], picture)
    return picture


def captions(path: str) -> Dataset:
    """Return a thousand captions for text models; ``path`` is the dataset's name."""
    return Dataset.from_dict({"text": [make_scene(f"{SEEDS[path]}/{n}", 2).caption for n in range(1000)]})


def register_datasets() -> None:
    """Register the captions with TorchTitan's text loaders."""
    DATASETS["shapes"] = DatasetConfig("shapes", captions, itemgetter("text"))
    # iterable: TorchTitan's validation loader exhausts a map-style dataset at the first validation
    DATASETS["shapes_validation"] = DatasetConfig(
        "shapes_validation", lambda path: captions(path).to_iterable_dataset(), itemgetter("text")
    )
