"""PyTorch's caching allocator to replay tapes with: compiled where the install had a C++ compiler, else in Python.

Both are the same to the byte. `planner.allocator.caching` is the reference: its rules, with their sources.
"""

try:
    from planner.allocator._compiled import CachingAllocator, alive, held
except ModuleNotFoundError:
    from planner.allocator.caching import CachingAllocator, alive, held

__all__ = ["CachingAllocator", "alive", "held"]
