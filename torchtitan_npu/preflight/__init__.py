"""Checks of a job before it starts: one module per section, run in order by :mod:`.job`."""
