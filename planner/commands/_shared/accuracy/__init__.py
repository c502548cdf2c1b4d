"""The comparisons of `vplan accuracy` other than memory peaks (step times, threads, an allocator's history), and its
output."""
