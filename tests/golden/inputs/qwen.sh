accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 qwen_image_train_network.py --model_version original --xformers --gradient_checkpointing \
  --network_module networks.lora --network_dim 32 --dit x.safetensors
