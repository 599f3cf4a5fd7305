"""Compare random layouts of a job with one rank: losses and every gradient of three steps.

``draws`` selects the combinations and shrinks a fault, ``job`` turns a draw into a TOML file, ``training`` runs it on
ranks, and ``proof`` compares, stores and counts the outcomes.
"""
