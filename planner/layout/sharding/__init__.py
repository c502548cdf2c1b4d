"""What engines that split a model over GPUs keep on each: ZeRO, FSDP2, NVMe offload."""
