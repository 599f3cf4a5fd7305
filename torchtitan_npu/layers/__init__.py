"""Modules and values that know neither a job nor TorchTitan."""
