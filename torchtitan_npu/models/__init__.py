"""Models that TorchTitan 0.2.2 does not have, laid out as its own are."""
