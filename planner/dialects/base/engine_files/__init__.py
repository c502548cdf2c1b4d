"""What a command says of the engine that splits training: a DeepSpeed file, or the flags of accelerate's FSDP."""
