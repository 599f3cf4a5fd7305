"""AdamW with one Triton kernel for all parameters, and gradient clipping in it."""
