accelerate launch --mixed_precision="bf16" scripts/wan2.1_fun/train_lora.py --video_sample_n_frames=81 \
  --pretrained_model_name_or_path=models/Diffusion_Transformer/Wan2.1-Fun-V1.1-14B-InP --train_batch_size=1
