"""The command ``torchtitan-npu completion``: completion of commands and options in a shell."""
