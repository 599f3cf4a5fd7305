"""Record the discrete decisions of a model, experts and keys, and train with recorded ones."""
