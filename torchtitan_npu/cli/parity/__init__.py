"""What tools/parity.py is made of: ``training`` runs a debug model, ``converters`` and ``layouts`` make tables,
``goals`` judges them."""
