"""Models and cards that we know, their shapes and components, and the user's own models."""
