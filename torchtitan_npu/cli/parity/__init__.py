"""``torchtitan-npu parity``: measure how far converters and layouts are from the eager baseline.

``cases`` has the models and layouts, and ``training`` trains one. ``compare_converters`` and ``compare_layouts`` build
the tables, and ``thresholds`` decides which rows fail.
"""
