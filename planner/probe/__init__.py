"""Measuring a plan with a few real steps, on a GPU or on a simulated one."""
