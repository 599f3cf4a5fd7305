"""Checkpoints that are complete or absent: atomic saves, a manifest with checksums, one writer, safe reading."""
