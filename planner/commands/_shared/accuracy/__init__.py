"""What `vplan accuracy` compares apart from peaks (step times, threads, an allocator's history), and how it prints."""
