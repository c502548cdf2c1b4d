"""Preflight: does a plan fit this machine as it is now?"""
