"""``torchtitan-npu prove``: compare random layouts and options of a job with one rank."""
