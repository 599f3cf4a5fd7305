"""Job configuration: the keys of each section, their allowed values, and the parser."""
