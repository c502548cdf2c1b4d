"""Watches a training command from inside while it is rehearsed: its phases, its peaks, its steps and where it ends.

Runs in the command's own Python, whichever it is (3.9 and newer), beside any version of torch from 2.5 on, and uses
nothing but the standard library until the command itself imports torch. `entry/sitecustomize.py` starts it.
"""
