"""A search that measures: Optuna studies, workers, and what probes teach."""
