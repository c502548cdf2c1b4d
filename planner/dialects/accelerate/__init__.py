"""The dialect of accelerate's launcher."""
