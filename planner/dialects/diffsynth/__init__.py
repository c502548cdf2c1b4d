"""The dialect of DiffSynth-Studio."""
