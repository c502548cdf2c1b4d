"""From a run to an estimate: memory peaks by phase, seconds, host RAM, and how certain they are.

Begin with `estimate` (`assess`, `estimate_run`); `stages` replays the run, `roofline` computes the seconds and
`host_ram` the RAM.
"""
