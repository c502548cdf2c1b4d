"""The dialect of SimpleTuner."""
