"""``torchtitan-npu parity``: measure how far converters and layouts are from the eager baseline.

``training`` trains a debug model, ``compare_converters`` and ``compare_layouts`` build the tables, and ``thresholds``
decides which rows fail.
"""
