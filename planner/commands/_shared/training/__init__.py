"""What `vplan train` does in this process: it picks a plan, prepares the data, starts the ranks and follows them.

Begin with `training_supervisor`; the ranks themselves are `trainers/train.py`.
"""
