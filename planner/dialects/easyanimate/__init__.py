"""The dialect of EasyAnimate and VideoX-Fun."""
