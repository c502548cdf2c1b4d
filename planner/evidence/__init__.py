"""Measurements: ours and published ones, how near estimates come, and what they correct."""
