"""Compare random layouts of a job with one rank: losses and every gradient of three steps.

``draws`` selects the combinations, ``job`` turns one into a TOML file, ``ranks`` and ``training`` run it, ``proof``
compares and shrinks, and ``results`` keeps and counts what was compared.
"""
