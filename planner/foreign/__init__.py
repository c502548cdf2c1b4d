"""Other trainers' commands checked and written, and out-of-memory messages explained.

`vplan check` goes through `case` (the command in our words), `check`, `pricing` (estimates of it and its changes), and
where it does not fit `smallest_change`, `least_memory` and `other_ways`. `vplan export` is `export`, `suggest --for`
`trainer_search`, and `check --error` the three files that begin with `oom_`.
"""
