accelerate launch --mixed_precision="bf16" scripts/z_image/train_lora.py --image_sample_size=1328 \
  --pretrained_model_name_or_path=models/Diffusion_Transformer/Z-Image --train_batch_size=1 --rank=64 \
  --gradient_checkpointing --target_name="to_q,to_k,to_v" --use_peft_lora
