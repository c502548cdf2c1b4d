"""Families of image models, which `trainers.families` finds here as beside it."""
