"""Everything that reaches into TorchTitan 0.2.2: train specs, rebinding, and one file per workaround."""
