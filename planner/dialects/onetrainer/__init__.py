"""The dialect of OneTrainer."""
