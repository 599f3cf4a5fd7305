"""What tools/convert_checkpoint.py is made of."""
