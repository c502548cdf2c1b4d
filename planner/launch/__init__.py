"""Starting training runs and following them: launchers, checkpoints, fallback plans.

Start with `launch`: the request to the ranks, how they are started and how they ended. `training_settings` completes
a run's training settings, `checkpoints` and `resume` are about what it continues from, and `run_history` and
`run_course` read its logs.
"""
