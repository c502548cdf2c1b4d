"""Search by measurement: workers that probe plans, the Optuna study they share, and the error model they fit."""
