accelerate launch --config_file examples/flux/model_training/full/accelerate_config.yaml \
  examples/flux/model_training/train.py --trainable_models dit --use_gradient_checkpointing \
  --model_id_with_origin_paths "black-forest-labs/FLUX.1-dev:flux1-dev.safetensors,\
black-forest-labs/FLUX.1-dev:text_encoder/model.safetensors,black-forest-labs/FLUX.1-dev:text_encoder_2/*.safetensors,\
black-forest-labs/FLUX.1-dev:ae.safetensors"
