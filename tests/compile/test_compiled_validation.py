"""A compiled job validates with another sequence length and batch size than it trains with."""

from __future__ import annotations

from tests._helpers.compiled_training import LAYOUTS, SMALL_BATCHES, assert_compiled, differences, train_on


def test_dynamic_graphs() -> None:
    """The losses are bit-identical to eager mode. The graphs are compiled once, at the first validation."""
    options = LAYOUTS["one, other batches"].options
    for name in ("seq_len", "local_batch_size"):
        assert options[f"validation.{name}"] != SMALL_BATCHES[f"training.{name}"]
    for eager, compiled in train_on("one, other batches", "llama3"):
        assert_compiled(eager, compiled)
        assert differences(eager, compiled) == [] and len(compiled.record.validation) == 2
        assert not compiled.changed
