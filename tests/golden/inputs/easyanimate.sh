export MODEL_NAME="/data/video_generation/EasyAnimateV5.1/EasyAnimateV5.1-7b-zh-InP"
export DATASET_NAME="/data/VFHQ/processed_hunyuan"
export DATASET_META_NAME="/data/VFHQ/video2caption_re_.json"
export NCCL_IB_DISABLE=1
export NCCL_P2P_DISABLE=1
export CUDA_VISIBLE_DEVICES=4,5,6,7
accelerate launch --mixed_precision="bf16" scripts/train.py --pretrained_model_name_or_path=$MODEL_NAME \
  --train_data_dir=$DATASET_NAME --train_data_meta=$DATASET_META_NAME \
  --config_path "config/easyanimate_video_v5.1_magvit_qwen.yaml" --image_sample_size=512 --video_sample_size=512 \
  --token_sample_size=512 --video_sample_stride=3 --video_sample_n_frames=49 --train_batch_size=1 --video_repeat=1 \
  --gradient_accumulation_steps=1 --dataloader_num_workers=8 --num_train_epochs=100 --checkpointing_steps=100 \
  --learning_rate=2e-05 --lr_scheduler="constant_with_warmup" --lr_warmup_steps=100 --seed=42 --output_dir=out \
  --gradient_checkpointing --mixed_precision="bf16" --adam_weight_decay=5e-3 --adam_epsilon=1e-10 \
  --vae_mini_batch=1 --max_grad_norm=0.05 --random_hw_adapt --training_with_video_token_length --loss_type="flow" \
  --enable_bucket --uniform_sampling --low_vram --train_mode="inpaint" --trainable_modules "."
