"""The model of a checkpoint, with which ``generate`` continues prompts and ``evaluate`` scores texts."""
