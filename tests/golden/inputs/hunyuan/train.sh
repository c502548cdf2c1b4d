accelerate launch src/musubi_tuner/hv_1_5_train_network.py --task t2v --dataset_config d.toml \
      --network_module networks.lora_hv_1_5 --mixed_precision bf16 --gradient_checkpointing --sdpa --fp8_scaled
