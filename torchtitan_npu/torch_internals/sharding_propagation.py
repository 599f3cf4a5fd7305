"""DTensor's sharding propagation: which layouts and shapes an operator's outputs have. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from torch.distributed.tensor.debug import (
    _clear_sharding_prop_cache,
    _get_fast_path_sharding_prop_cache_stats,
    _get_python_sharding_prop_cache_info,
)


def clear_sharding_cache() -> None:
    """Drop all cached propagations. Do this when sharding rules change, or when a new mesh reuses group names."""
    _clear_sharding_prop_cache()


def uncached_propagations() -> int:
    """Return how many propagations since the last clear found no cached result, in C++ and in Python.

    Such a propagation also runs the operator on unsharded fake tensors, which dispatch modes see.
    """
    _, fast_path_misses = _get_fast_path_sharding_prop_cache_stats()
    return fast_path_misses + _get_python_sharding_prop_cache_info().misses
