"""``torchtitan-npu launch``: start a job with torchrun, and report the first failure first."""
