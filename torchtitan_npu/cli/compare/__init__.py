"""``torchtitan-npu compare``: compare loss curves with a baseline.

``sources`` reads each run into a :class:`~.curves.Curve`. ``comparison`` aligns two curves and decides the verdict,
``metrics`` compares one metric, ``diagnosis`` names typical differences. ``report`` collects the result as blocks that
``document`` writes as Markdown and HTML, and ``plot`` draws it. ``train_runs`` trains runs that do not exist yet.
"""
