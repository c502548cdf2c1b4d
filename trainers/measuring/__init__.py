"""Measuring real steps: phases, counters and a run's metrics."""
