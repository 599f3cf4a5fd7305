"""End a job well: name the rank that failed or hangs, stop all ranks after the same step, end with the launcher."""
