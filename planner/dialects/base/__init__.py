"""What all dialects share: bindings, flags, launchers, scripts and config files.

Begin with `bindings` (how one setting and one field say the same) and `dialect` (a trainer's whole table of them, and
reading by it); `common_bindings` are in many tables. `script` is what was given to `vplan check`, `flags` which flags a
trainer's scripts have, `commands` and `launchers` read the two halves of a command.
"""
