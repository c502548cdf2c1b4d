"""The dialect of sd-scripts for Stable Diffusion 3 and 3.5."""
