accelerate launch --mixed_precision="fp16" train_text_to_image.py --use_ema --resolution=512 \
  --pretrained_model_name_or_path=CompVis/stable-diffusion-v1-4 --gradient_accumulation_steps=4 --train_batch_size=1
