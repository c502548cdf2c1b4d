accelerate launch --mixed_precision bf16 --num_cpu_threads_per_process 1 flux_train_network.py
--pretrained_model_name_or_path flux1-dev.safetensors --clip_l clip_l.safetensors --t5xxl t5xxl_fp16.safetensors
  --ae ae.safetensors --cache_latents_to_disk --cache_latents --sdpa --gradient_checkpointing
--network_module networks.lora_flux --network_dim 4 --optimizer_type adamw8bit --fp8_base --cache_text_encoder_outputs
--blocks_to_swap 8
