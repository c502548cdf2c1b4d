"""What all dialects share: bindings, flags, launchers, scripts and config files."""
