"""Families of image models; `trainers.families` finds them here."""
