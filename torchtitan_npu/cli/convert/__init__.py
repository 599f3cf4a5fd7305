"""``torchtitan-npu convert``: convert a checkpoint between Hugging Face's format and DCP."""
