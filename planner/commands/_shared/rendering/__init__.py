"""Answers as people read them in the terminal."""
