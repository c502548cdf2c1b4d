"""What really runs: the training step and everything that executes it. torch is imported here and nowhere else."""
