"""Folders of clips and captions, without torch: which files, at which shapes."""
