"""Hollow checkpoints: files with the names, shapes and dtypes of published weights, and no data.

They stand in for weights that are not there while a command is rehearsed (`vplan rehearse --hollow`). The files are
sparse: they take a few kilobytes of disk, read as zeros, and are gone after the run.
"""
