"""Rotations by position that models are built from and converters look for; neither has to know the other."""
