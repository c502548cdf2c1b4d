"""What checkpoints of blocks keep, and where: on the GPU, in host RAM, in 8 bits."""
