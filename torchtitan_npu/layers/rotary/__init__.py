"""Rotary position embedding: what models are built from and converters look for. Neither imports the other."""
