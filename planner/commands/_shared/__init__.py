"""Code shared by the verbs, and the longer parts of single verbs.

Every verb uses `verb` (help, exit codes, the answer as text or JSON). Verbs about a plan use `options` (a flag for each
field), `request` (the typed question) and `rendering`. Parts of single verbs: `accuracy` and `training`, `oom` (check),
`grid_campaign` (calibrate), `gpu_count` (suggest), `own_model` (record) and `progress` (tune).
"""
