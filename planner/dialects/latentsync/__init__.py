"""The dialect of LatentSync."""
