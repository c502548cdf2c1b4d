"""Families of video models, which `trainers.families` finds here as beside it."""
