"""Kernels for NVIDIA GPUs under torch_npu's operator names: Triton, Gluon for Hopper GPUs, and PyTorch's.

``registry.py`` lists the kernels of each operator and when each runs. No module outside this folder imports it:
:mod:`torchtitan_npu.ops.core.gpu` loads the registry and the kernels by name at the first call on a GPU.
"""
