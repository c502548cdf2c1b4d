"""The five stories' commands as people paste them, and how a printed change is applied to one."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from planner.commands import cli

GIB = 2**30

_WAN = "Wan-AI/Wan2.1-I2V-14B-480P"
DIFFSYNTH = (
    "accelerate launch examples/wanvideo/model_training/train.py --dataset_base_path data/my_set "
    "--dataset_metadata_path data/my_set/metadata.csv --height 480 --width 832 --dataset_repeat 100 "
    f'--model_id_with_origin_paths "{_WAN}:diffusion_pytorch_model*.safetensors,{_WAN}:models_t5_umt5-xxl-enc-bf16.pth,'
    f'{_WAN}:Wan2.1_VAE.pth,{_WAN}:models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth" '
    '--learning_rate 1e-4 --num_epochs 5 --remove_prefix_in_ckpt "pipe.dit." --output_path ./models/train/lora '
    '--lora_base_model dit --lora_target_modules "q,k,v,o,ffn.0,ffn.2" --lora_rank 32 --extra_inputs input_image'
)
DIFFSYNTH_OLD = (
    "python examples/wanvideo/train_wan_t2v.py --task train --train_architecture lora --dataset_path "
    f'data/example_dataset --output_path ./models --dit_path "models/{_WAN}/diffusion_pytorch_model-00001-of-00007.'
    f'safetensors,models/{_WAN}/diffusion_pytorch_model-00007-of-00007.safetensors" --steps_per_epoch 500 '
    '--max_epochs 10 --learning_rate 1e-4 --lora_rank 16 --lora_alpha 16 --lora_target_modules "q,k,v,o,ffn.0,ffn.2" '
    "--accumulate_grad_batches 1 --training_strategy deepspeed_stage_3"
)
EASYANIMATE = """\
export MODEL_NAME="/data/video_generation/EasyAnimateV5.1/EasyAnimateV5.1-7b-zh-InP"
export DATASET_NAME="/data/VFHQ/processed_hunyuan"
export DATASET_META_NAME="/data/VFHQ/video2caption_re_.json"
export NCCL_IB_DISABLE=1
export NCCL_P2P_DISABLE=1
export CUDA_VISIBLE_DEVICES=4,5,6,7
accelerate launch --mixed_precision="bf16" scripts/train.py --pretrained_model_name_or_path=$MODEL_NAME \\
  --train_data_dir=$DATASET_NAME --train_data_meta=$DATASET_META_NAME \\
  --config_path "config/easyanimate_video_v5.1_magvit_qwen.yaml" --image_sample_size=512 --video_sample_size=512 \\
  --token_sample_size=512 --video_sample_stride=3 --video_sample_n_frames=49 --train_batch_size=1 --video_repeat=1 \\
  --gradient_accumulation_steps=1 --dataloader_num_workers=8 --num_train_epochs=100 --checkpointing_steps=100 \\
  --learning_rate=2e-05 --lr_scheduler="constant_with_warmup" --lr_warmup_steps=100 --seed=42 --output_dir=out \\
  --gradient_checkpointing --mixed_precision="bf16" --adam_weight_decay=5e-3 --adam_epsilon=1e-10 \\
  --vae_mini_batch=1 --max_grad_norm=0.05 --random_hw_adapt --training_with_video_token_length --loss_type="flow" \\
  --enable_bucket --uniform_sampling --low_vram --train_mode="inpaint" --trainable_modules "."
"""
ZERO_2 = EASYANIMATE.replace(
    "accelerate launch",
    "accelerate launch --use_deepspeed --deepspeed_config_file config/zero_stage2_config.json "
    "--deepspeed_multinode_launcher standard",
).replace("--low_vram", "--low_vram --use_deepspeed")
LATENTSYNC = (
    "torchrun --nnodes=1 --nproc_per_node=1 --master_port=25679 -m scripts.train_unet "
    "--unet_config_path configs/unet/stage1.yaml"
)
FLUX = (
    "accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 flux_train.py "
    "--pretrained_model_name_or_path flux1-dev.safetensors --clip_l clip_l.safetensors --t5xxl t5xxl_fp16.safetensors "
    "--ae ae.safetensors --dataset_config dataset_1024_bs1.toml --output_dir out --output_name flux_ft --save_model_as "
    "safetensors --save_precision bf16 --mixed_precision bf16 --full_bf16 --sdpa --gradient_checkpointing --highvram "
    '--optimizer_type Prodigy --optimizer_args "decouple=True" "weight_decay=0.01" "use_bias_correction=True" '
    "--learning_rate 1.0 --lr_scheduler constant --max_train_epochs 4 --max_data_loader_n_workers 2 "
    "--persistent_data_loader_workers --seed 42 --timestep_sampling shift --discrete_flow_shift 3.1582 "
    "--model_prediction_type raw --guidance_scale 1.0"
)
REPAIRED = FLUX.replace("--highvram ", "").replace("Prodigy", "adamw8bit").replace("1.0 --lr", "1e-5 --lr")
BOTH_CACHES = " --cache_latents --cache_text_encoder_outputs"
PIPELINE = """\
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
from diffusers.hooks import apply_group_offloading

model = "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"
vae = AutoencoderKLWan.from_pretrained(model, subfolder="vae", torch_dtype=torch.float32)
pipe = WanImageToVideoPipeline.from_pretrained(model, vae=vae, torch_dtype=torch.bfloat16)
apply_group_offloading(pipe.text_encoder, onload_device=torch.device("cuda"), offload_device=torch.device("cpu"),
                       offload_type="block_level", num_blocks_per_group=4)
pipe.transformer.enable_group_offload(onload_device=torch.device("cuda"), offload_device=torch.device("cpu"),
                                      offload_type="leaf_level", use_stream=True)
video = pipe(image=image, prompt="a cat walks", num_frames=81, height=480, width=832, guidance_scale=5.0).frames[0]
"""


class Answer:
    """What `vplan check --json` said, in GiB; refused where the command contradicts itself."""

    def __init__(self, code: int, found: dict[str, Any]) -> None:
        self.code, self.found = code, found
        self.verdict: str = found.get("verdict", "refused")
        self.phase: str = found.get("phase", "")
        self.fixes: list[tuple[str, ...]] = [tuple(fix["change"]) for fix in found.get("fixes", ())]

    def allocated(self, phase: str) -> float:
        return float(self.found["estimate"]["phases"][phase]["allocated_bytes"]) / GIB

    @property
    def device(self) -> float:
        return float(self.found["estimate"]["peak"]["device_bytes"]) / GIB

    @property
    def host(self) -> float:
        return float(self.found["estimate"]["host_ram_bytes"]) / GIB

    @property
    def notes(self) -> str:
        return " | ".join(self.found["estimate"]["assumptions"])

    def why(self, part: str, flag: str) -> str:
        """What is said of a flag in `ineffective` or `gone`."""
        return next(str(each["why"]) for each in self.found[part] if each["flag"] == flag)


def check(gpu: str, given: str | Path, *options: str) -> Answer:
    """`vplan check`, of a command or of a file."""
    what = [str(given)] if isinstance(given, Path) else ["--", *shlex.split(given)]
    done = CliRunner().invoke(cli, ["check", "--gpu", gpu, "--json", *options, *what])
    return Answer(done.exit_code, json.loads(done.stdout))


def applied(command: str, change: tuple[str, ...] | list[str]) -> str:
    """A command with a printed change: a launcher's flags in front, a script's behind, where the last one counts."""
    for part in change:
        if part.startswith("accelerate launch "):
            launcher, _, rest = part.partition(" scripts/")
            command = command.replace("accelerate launch", launcher, 1).rstrip() + f" {rest.partition('... ')[2]}\n"
        elif part.startswith("export "):
            command = f"{part}\n{command}" if "\n" in command.strip() else f"{part.removeprefix('export ')} {command}"
        else:
            assert part.startswith("--"), part
            command = f"{command.rstrip()} {part}\n"
    return command
