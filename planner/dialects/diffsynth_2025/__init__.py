"""The dialect of DiffSynth-Studio's first Wan script."""
