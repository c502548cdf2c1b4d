"""Families of video models; `trainers.families` finds them here."""
