"""DeepSeek's sparse attention (DSA), for the models that have it and for ``npu_dsa``. Neither imports the other."""
