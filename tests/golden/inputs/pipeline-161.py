# ruff: noqa
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
from diffusers.hooks import apply_group_offloading

model = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae", torch_dtype=torch.float32)
pipe = WanImageToVideoPipeline.from_pretrained(model, vae=vae, torch_dtype=torch.bfloat16)
apply_group_offloading(
    pipe.text_encoder,
    onload_device=torch.device("cuda"),
    offload_device=torch.device("cpu"),
    offload_type="block_level",
    num_blocks_per_group=4,
)
pipe.transformer.enable_group_offload(
    onload_device=torch.device("cuda"), offload_device=torch.device("cpu"), offload_type="leaf_level", use_stream=True
)
video = pipe(image=image, prompt="a cat walks", num_frames=161, height=480, width=832, guidance_scale=5.0).frames[0]
