"""``[compile] enable = true`` with ``[npu] bypass_codegen = true``: compiled regions that launch eager mode's kernels."""
