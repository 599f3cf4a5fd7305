"""What an operator is, and how it is registered: dispatch, autograd and DTensor rules."""
