"""Which strategy to choose: the space, what rules strategies out, and their order."""
