"""Train specs registered with TorchTitan 0.2.2: of its models and of this package's."""
