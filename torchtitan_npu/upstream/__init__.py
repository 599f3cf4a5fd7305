"""Everything that reaches into TorchTitan 0.2.2: train specs, hooks, and one module per workaround."""
