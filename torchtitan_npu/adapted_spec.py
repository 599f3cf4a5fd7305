"""The mark of a train spec that brings what our converters and layouts need: see :mod:`torchtitan_npu.train_specs`."""

from __future__ import annotations

from torchtitan.protocols.train_spec import TrainSpec


class AdaptedTrainSpec(TrainSpec):
    """A TrainSpec that :func:`torchtitan_npu.train_specs.adapt` made."""
