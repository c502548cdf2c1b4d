"""What an optimizer does on the GPU, where it is not as it was recorded: in backward, over masters, paged."""
