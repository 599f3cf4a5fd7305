"""Gluon and Triton kernels of attention over selected keys, and of its gradient."""
