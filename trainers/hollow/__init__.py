"""What a rehearsal asks of the command's own Python: shapes of models on the meta device, and files that torch writes.

Run by path in whichever Python the command has (3.9 and newer), beside any version of its libraries.
"""
