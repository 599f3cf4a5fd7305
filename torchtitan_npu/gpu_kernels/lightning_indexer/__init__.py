"""Gluon and Triton kernels of the lightning indexer: scores, top-k, and gradients of the selected scores."""
