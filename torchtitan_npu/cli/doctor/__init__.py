"""``torchtitan-npu doctor``: check whether this machine can train. One module per group of checks."""
