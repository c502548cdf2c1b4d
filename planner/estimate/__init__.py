"""From a run to an estimate: peaks by phase, seconds, host RAM and how sure they are.

Begin with `estimate` (`assess`, `estimate_run`); `stages` replays the run for it, `roofline` has the seconds and
`host_ram` the RAM.
"""
