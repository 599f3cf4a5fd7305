"""An emulator of CANN: the real torch_npu computes on the CPU, without an NPU."""
