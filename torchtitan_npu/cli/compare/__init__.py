"""``torchtitan-npu compare``: compare two loss curves.

``sources`` reads each side into a :class:`~.curves.Curve`. ``comparison`` aligns the curves and decides the verdict,
``metrics`` compares one metric, ``diagnosis`` names typical differences. ``report`` and ``plot`` write the result.
``train_pair`` trains the two runs if they do not exist yet.
"""
