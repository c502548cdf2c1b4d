"""Holds one file that Python imports by itself; this folder is put on the command's PYTHONPATH, and nothing else is."""
