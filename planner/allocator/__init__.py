"""PyTorch's CUDA caching allocator, compiled or in Python, to replay tapes with."""
