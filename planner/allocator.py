"""PyTorch's caching allocator to replay tapes with: compiled where the install had a C++ compiler, else in Python.

Both are the same to the byte. `planner.replay` is the reference: its rules, with their sources.
"""

try:
    from planner._allocator import CachingAllocator, alive, held
except ModuleNotFoundError:
    from planner.replay import CachingAllocator, alive, held

__all__ = ["CachingAllocator", "alive", "held"]
