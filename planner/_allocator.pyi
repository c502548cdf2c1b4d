"""What is compiled has the types of what is in Python."""

from planner.replay import CachingAllocator as CachingAllocator
from planner.replay import alive as alive
from planner.replay import held as held
