"""The gate before a long job: is there room on this machine, now?"""
