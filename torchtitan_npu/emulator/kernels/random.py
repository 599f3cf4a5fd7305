"""Random numbers: a function of seed and offset, which torch_npu's generator counts.

The numbers are not the NPU's: compare with an NPU from a checkpoint. Operators that end in ``Tensor`` read seed and
offset from the device, for captured graphs.
"""

from __future__ import annotations

import math

import torch

from torchtitan_npu.emulator.kernels.registry import kernel, write


def generator(seed, offset):
    """Return torch's CPU generator for one launch."""
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + offset) & ((1 << 63) - 1))


def drawn(like, fill, *arguments):
    """Fill a new tensor of the same shape and dtype: ``fill`` writes contiguous memory faster, and always alike."""
    made = torch.empty(like.shape, dtype=like.dtype)
    fill(made, *arguments[:-2], generator=generator(*arguments[-2:]))
    return made


def register_in_place(name, fill):
    """Register ``aclnnInplace<name>`` and its variant with seed and offset on the device."""

    @kernel(f"aclnnInplace{name}")
    def run(x, *arguments):
        write(x, drawn(x, fill, *arguments))

    @kernel(f"aclnnInplace{name}Tensor")
    def run_with_tensors(x, *arguments):
        *parameters, seed, offset, offset_in_graph = arguments
        write(x, drawn(x, fill, *parameters, int(seed.item()), int(offset.item()) + offset_in_graph))


register_in_place("Normal", torch.Tensor.normal_)
register_in_place("Uniform", torch.Tensor.uniform_)
register_in_place("Random", torch.Tensor.random_)
register_in_place("RandomWithoutFromTo", torch.Tensor.random_)


@kernel("aclnnSimThreadExponential")
def exponential(x, count, rate, seed, offset):
    write(x, drawn(x, torch.Tensor.exponential_, rate, seed, offset))


@kernel("aclnnNormalFloatFloat", "aclnnNormalFloatTensor", "aclnnNormalTensorFloat", "aclnnNormalTensorTensor")
def normal(mean, std, seed, offset, out):
    write(out, drawn(out, torch.Tensor.normal_, 0.0, 1.0, seed, offset) * std + mean)


@kernel("aclnnInplaceBernoulli", "aclnnInplaceBernoulliTensor")
def bernoulli(x, probability, seed, offset):
    uniform = torch.rand(x.shape, dtype=torch.float32, generator=generator(seed, offset))
    write(x, uniform < probability)


@kernel("aclnnRandperm")
def permutation(length, seed, offset, out):
    write(out, torch.randperm(length, dtype=torch.int64, generator=generator(seed, offset)))


@kernel("aclnnMultinomial")
def multinomial(weights, samples, replacement, seed, offset, out):
    write(out, torch.multinomial(weights.float(), samples, replacement, generator=generator(seed, offset)))


@kernel("aclnnMultinomialTensor")
def multinomial_with_tensors(weights, samples, replacement, seed, offset, offset_in_graph, out):
    multinomial(weights, samples, replacement, int(seed.item()), int(offset.item()) + offset_in_graph, out)


def pack_bits(bits, out):
    """Write one bit an element, the lowest bit first, eight to a byte."""
    padded = torch.zeros(out.numel() * 8, dtype=torch.uint8)
    padded[: bits.numel()] = bits.reshape(-1)
    shifts = torch.arange(8, dtype=torch.uint8)
    write(out, (padded.view(-1, 8) << shifts).sum(1, dtype=torch.uint8))


def unpack_bits(mask, shape):
    """Return the bits as a bool tensor of this shape."""
    bits = mask.reshape(-1, 1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.reshape(-1)[: math.prod(shape)].reshape(shape).bool()


def write_dropout_mask(shape, probability, seed, offset, out):
    uniform = torch.rand(math.prod(shape), dtype=torch.float32, generator=generator(seed, offset))
    pack_bits(uniform >= probability, out)


@kernel("aclnnDropoutGenMask")
def dropout_mask(shape, probability, seed, offset, out):
    write_dropout_mask(shape, probability, seed, offset, out)


@kernel("aclnnDropoutGenMaskV2")
def dropout_mask_of_dtype(shape, probability, seed, offset, dtype, out):
    write_dropout_mask(shape, probability, seed, offset, out)


@kernel("aclnnDropoutGenMaskV2Tensor")
def dropout_mask_with_tensors(shape, probability, seed, offset, offset_in_graph, dtype, out):
    write_dropout_mask(shape, probability, int(seed.item()), int(offset.item()) + offset_in_graph, out)


@kernel("aclnnDropoutDoMask")
def apply_dropout_mask(x, mask, probability, out):
    survives = unpack_bits(mask, x.shape)
    write(out, x * survives * (1 / (1 - probability)) if probability < 1 else torch.zeros_like(x))


@kernel("aclnnDropoutV3")
def dropout(x, noise_shape, probability, seed, offset, out, mask):
    write_dropout_mask(x.shape, probability, seed, offset, mask)
    apply_dropout_mask(x, mask, probability, out)
