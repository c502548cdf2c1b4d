"""What will happen: the estimate, the search and the commands. Imports no torch."""
