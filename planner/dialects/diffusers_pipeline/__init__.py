"""The dialect of a diffusers pipeline in a Python file."""
