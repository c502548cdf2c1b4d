"""Starting training runs and following them: launchers, checkpoints, fallback plans."""
