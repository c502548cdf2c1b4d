"""What the verbs share, and the longer parts of single verbs.

Every verb uses `verb` (help, exit codes, the answer as text or JSON); those that ask about a plan `options` (a flag for
each field), `request` (the typed question) and `rendering`. Of one verb alone are `accuracy` and `training`, and of
check `oom`, of calibrate `grid_campaign`, of suggest `gpu_count`, of record `own_model`, of tune `progress`.
"""
