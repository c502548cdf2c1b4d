"""Tapes: the recorded allocations of one training step, their file format and their variants."""
