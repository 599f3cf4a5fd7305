"""``torchtitan-npu compare``: compare loss curves with a baseline."""
