"""The dialect of sd-scripts."""
