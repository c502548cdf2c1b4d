"""What the verbs share, and the longer parts of single verbs.

Every verb uses `verb` (help, exit codes, the answer as text or JSON); those that ask about a plan `options` (a flag for
each field), `request` (the typed question) and `rendering`. Of train are `pick_plan`, `training_supervisor`,
`slurm_script` and the files that begin with `run_` (watch has them too); of check `fixes` and `oom`, of calibrate
`grid_campaign`, of suggest `gpu_count`, of record `own_model`, of tune `progress`.
"""
