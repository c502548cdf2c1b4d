accelerate launch --num_cpu_threads_per_process 1 wan_train_network.py --task t2v-14B --sdpa --fp8_base \
  --dit models/wan_bf16.safetensors --dataset_config data.toml --mixed_precision bf16 --optimizer_type adamw8bit \
  --gradient_checkpointing --network_module networks.lora_wan --network_dim 32 --blocks_to_swap 20 --no_such 1
