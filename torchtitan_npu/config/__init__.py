"""Job configuration: one module per section with its keys and their checks, the parser, and the preflight."""
