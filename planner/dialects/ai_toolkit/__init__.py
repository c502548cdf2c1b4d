"""The dialect of ai-toolkit."""
