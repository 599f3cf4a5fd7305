"""``torchtitan-npu data``: show the rows that a job trains on."""
