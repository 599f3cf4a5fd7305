"""The swap optimizer: Adam's moments live in host memory, and pass through the device slice by slice in the step."""
