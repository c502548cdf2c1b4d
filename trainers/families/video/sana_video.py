"""SANA-Video: flow matching with linear attention over the tokens of a clip (arXiv 2509.24695; diffusers
SanaVideoTransformer3DModel; SimpleTuner helpers/models/sanavideo/model.py at bc8e6ab)."""

from __future__ import annotations

from torch import Tensor

from trainers.families.common.encoding import Encoder, EncoderTurn, likeliest, per_channel, pixels
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.image.sana import Sana


class SanaVideo(Sana):
    """SANA's blocks over clips: linear attention with positions, cross-attention to the prompt under a mask, and
    convolutions over a frame and over time."""

    fixed: dict[str, int] = {}

    def latents(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["latents"]

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Gemma2Model", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        """Of the size asked for, where the pipeline would take the nearest of its own and resize the clip. Beside
        embeddings it takes no empty caption, which is its default."""
        return FamilyPipeline(
            pipeline="SanaVideoPipeline",
            prompt={"prompt": "prompt_embeds", "prompt_mask": "prompt_attention_mask"},
            scheduler="DPMSolverMultistepScheduler",  # as scripts/convert_sana_video_to_diffusers.py makes it
            settings={"use_flow_sigmas": True, "prediction_type": "flow_prediction"},
            call={"use_resolution_binning": False, "negative_prompt": None},
            frames="frames",
        )


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, F, h, w)} by the mode of the posterior, every channel with mean 0 and deviation 1, as
    Wan's own VAE gives them (NVlabs/Sana diffusion/model/builder.py ``vae_encode``)."""
    latents, config = likeliest(encoder, pixels(encoder, frames)), encoder.model.config
    latents = (latents - per_channel(config.latents_mean, latents)) / per_channel(config.latents_std, latents)
    return {"latents": latents[0]}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """The last states of Gemma 2 for captions alone, padded, with their mask: no instruction is put before them."""
    pipe = encoder.pipeline("SanaVideoPipeline")
    prompt, mask = pipe._get_gemma_prompt_embeds(
        captions, encoder.device, encoder.model.dtype, max_sequence_length=encoder.tokens
    )
    return {"prompt": prompt, "prompt_mask": mask.bool()}


FAMILY = SanaVideo
