"""The dialect of diffusion-pipe."""
