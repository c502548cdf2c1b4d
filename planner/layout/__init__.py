"""From tapes to a run: what each strategy adds, moves or divides. One file a strategy.

Begin with `run` (what is laid out), then `pipeline` (in which order what is done to it), then any strategy's file.
`recordings` finds the tapes; `phases` and `encoders_vae` lay out what is around training; `correction` and `margin`
say how sure the numbers are.
"""
