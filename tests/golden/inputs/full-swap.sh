accelerate launch --mixed_precision bf16 flux_train.py --gradient_checkpointing \
  --pretrained_model_name_or_path FLUX.1-dev.safetensors --double_blocks_to_swap 4 --single_blocks_to_swap 8
