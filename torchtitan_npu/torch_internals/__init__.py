"""The only importer of private torch APIs.

Each is behind a name that says what it does. The docstring of a module or function says which torch versions it was
seen on. Each has a small test in ``tests/torch_internals``, which fails first when torch changes.
"""
