"""Hostile input for the command line, drawn from a seed: `python -m tests.trials --minutes 10 --seed 1`."""
