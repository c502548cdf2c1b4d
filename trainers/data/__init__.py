"""From clips to batches: encoding, the cache and the loader."""
