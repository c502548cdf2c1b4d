"""Which combinations of job, strategy, machine and model may run. A module for each kind of row; the whole table is in
`planner.spec.combinations.table`."""
