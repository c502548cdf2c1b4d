"""The dialect of diffusers' example scripts."""
