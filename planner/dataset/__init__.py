"""Datasets: folders of clips and captions, which files are used, and at which shapes. Imports no torch."""
