"""Runs a training command on a GPU that does not exist: its libraries, its cards, the run and what is read from it."""
