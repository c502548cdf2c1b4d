export MODEL_NAME="stabilityai/stable-diffusion-xl-base-1.0"
accelerate launch train_text_to_image_lora_sdxl.py --pretrained_model_name_or_path=$MODEL_NAME \
  --pretrained_vae_model_name_or_path="madebyollin/sdxl-vae-fp16-fix" --resolution=1024 --train_batch_size=1 \
  --mixed_precision="fp16" --validation_prompt="cute dragon creature"
