"""VideoX-Fun's words, read at 804a425: its scripts are EasyAnimate's, with flags of their own."""

from planner.dialects.easyanimate.settings import VIDEOX_FUN as DIALECT

__all__ = ["DIALECT"]
