"""Training on several GPUs: engines, context parallelism, checkpoints and export."""
