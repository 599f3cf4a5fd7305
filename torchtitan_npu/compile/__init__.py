"""``[compile] enable = true`` with ``[npu] bypass_codegen = true``: compiled regions that run eager's kernels."""
