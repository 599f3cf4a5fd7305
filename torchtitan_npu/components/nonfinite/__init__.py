"""Steps whose loss or gradients are not finite: skip them, or stop with a report of where it started."""
