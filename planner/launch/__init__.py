"""Starting training runs and following them: launchers, checkpoints, fallback plans.

Begin with `launch` (what the ranks are told, how they are started and how they ended). `training_settings` completes
how a run trains, `checkpoints` and `resume` are what it goes on from, `run_history` and `run_course` what it wrote of
itself.
"""
