"""The dialect of musubi-tuner."""
