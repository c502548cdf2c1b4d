"""Validation samples while a model trains."""
