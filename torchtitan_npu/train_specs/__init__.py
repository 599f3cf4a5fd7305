"""What is registered with TorchTitan 0.2.2: train specs of its models and of this package's."""
