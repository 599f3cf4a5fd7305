"""A compiled job without graph passes validates on another length and another batch than it trains on."""

from __future__ import annotations

from tests._helpers.compiled_training import LAYOUTS, TINIER, assert_compiled, differences, train_on


def test_graphs_for_any_length_and_batch() -> None:
    """Eager's losses to the bit, from graphs that are compiled once, at the first validation."""
    options = LAYOUTS["one, other batches"].options
    for name in ("seq_len", "local_batch_size"):
        assert options[f"validation.{name}"] != TINIER[f"training.{name}"]
    for eager, compiled in train_on("one, other batches", "llama3"):
        assert_compiled(eager, compiled)
        assert differences(eager, compiled) == [] and len(compiled.record.validation) == 2
        assert not compiled.changed
