"""``[compile] enable = true`` with ``[npu] bypass_codegen = true``: compiled regions with eager mode's kernels."""
