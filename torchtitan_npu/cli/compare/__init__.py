"""Two loss curves in, a verdict out: the parts behind ``tools/compare_loss.py``.

``read`` brings each side to a :class:`~.curves.Curve`, ``compare`` aligns and measures, ``patterns`` names what went
wrong, ``report`` and ``picture`` write it down, ``launch`` makes the two runs when they do not exist yet.
"""
