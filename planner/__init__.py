"""What will happen: the estimate, the search and the commands. Imports no torch."""

__version__ = "0.2.0"
