"""The dialect of sd-scripts' scripts for SDXL and SD 1.5."""
