"""``torchtitan-npu emulate``: run a command on emulated NPUs."""
