"""The one training step: model, optimizer, precision and the two experts."""
