"""From a run to an estimate: peaks by phase, seconds, host RAM and how sure they are."""
