"""The command ``torchtitan-npu``: a module per subcommand, or a folder if it has several."""
