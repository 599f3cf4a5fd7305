"""The volume of collectives, for benchmarks and the planner."""

from __future__ import annotations

BYTES_SENT_PER_INPUT_BYTE = {
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
    "shard_dim_alltoall": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}
"""Bytes that a rank sends in each functional collective over ``n`` ranks, per byte of its input."""
