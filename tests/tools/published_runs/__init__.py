"""Published runs tried again: the trainer's own code at its commit, with the packages of its day, on a virtual GPU."""
