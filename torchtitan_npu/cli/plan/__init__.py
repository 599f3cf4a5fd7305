"""``torchtitan-npu plan``: dry runs of a job, and a search over its layouts."""
