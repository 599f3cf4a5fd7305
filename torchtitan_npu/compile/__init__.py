"""``[npu] bypass_codegen = "inductor"``: compiled regions that call the operators of eager mode."""
