"""Hooks into functions of TorchTitan 0.2.2 that offer none."""
