"""Where a training step keeps what does not fit: one file for each way that is not torch's or diffusers' own."""
