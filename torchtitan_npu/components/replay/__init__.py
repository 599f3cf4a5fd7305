"""Record the discrete choices of a model, experts and keys, and train with recorded ones."""
