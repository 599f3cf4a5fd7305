"""What tools/doctor.py checks, one file a kind of check."""
