"""Other trainers' commands checked and written, and out-of-memory messages explained."""
