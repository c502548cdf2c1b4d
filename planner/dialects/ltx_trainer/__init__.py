"""The dialect of Lightricks' ltx-trainer."""
