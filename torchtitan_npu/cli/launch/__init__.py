"""What tools/launch.py is made of."""
