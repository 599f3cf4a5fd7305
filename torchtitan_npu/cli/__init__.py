"""The command ``torchtitan-npu``, one folder per subcommand."""
