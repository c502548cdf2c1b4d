"""What is compiled has the types of what is in Python."""

from planner.allocator.caching import CachingAllocator as CachingAllocator
from planner.allocator.caching import alive as alive
from planner.allocator.caching import held as held
