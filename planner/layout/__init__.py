"""From tapes to a run: what each strategy adds, moves or divides. One file a strategy."""
