"""``torchtitan-npu list``: what this package brings."""
