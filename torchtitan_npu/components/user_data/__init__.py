"""The user's texts and conversations: ``training.dataset = "text"`` or ``"chat"``. See docs/how-to/data.md.

``files`` reads records in blocks, ``order`` shuffles and mixes them, ``documents`` turns a record into tokens,
``packing`` fills the rows of a batch. No step keeps a file in memory, and every position is a few integers.
"""
