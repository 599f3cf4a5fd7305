"""Gluon and Triton kernels of the loss of the lightning indexer."""
