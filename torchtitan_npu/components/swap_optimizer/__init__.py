"""The swap optimizer: Adam's moments stay in host memory and pass through the device slice by slice in each step."""
