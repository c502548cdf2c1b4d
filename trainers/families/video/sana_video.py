"""SANA-Video: flow matching with linear attention over the tokens of a clip (arXiv 2509.24695; diffusers
SanaVideoTransformer3DModel; SimpleTuner helpers/models/sanavideo/model.py at bc8e6ab)."""

from __future__ import annotations

from torch import Tensor

from trainers.families.common.encoding import Encoder, EncoderTurn, likeliest, pixels, standardised
from trainers.families.common.sampling import FamilyPipeline
from trainers.families.image.sana import Sana


class SanaVideo(Sana):
    """SANA's blocks over clips: linear attention with positions, masked cross-attention to the prompt, and convolutions
    over frames and time."""

    fixed: dict[str, int] = {}

    def latents(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["latents"]

    def clip_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("vae", self.profile.vae.class_name, encode_clip),)

    def text_turns(self) -> tuple[EncoderTurn, ...]:
        return (EncoderTurn("text_encoder", "Gemma2Model", encode_prompt, "tokenizer"),)

    def sampler(self) -> FamilyPipeline:
        """Samples have the requested size; by default the pipeline generates the nearest of its own sizes and resizes
        the clip. The default empty caption is not allowed together with embeddings."""
        return FamilyPipeline(
            pipeline="SanaVideoPipeline",
            prompt={"prompt": "prompt_embeds", "prompt_mask": "prompt_attention_mask"},
            scheduler="DPMSolverMultistepScheduler",  # as scripts/convert_sana_video_to_diffusers.py makes it
            settings={"use_flow_sigmas": True, "prediction_type": "flow_prediction"},
            call={"use_resolution_binning": False, "negative_prompt": None},
            frames="frames",
        )


def encode_clip(encoder: Encoder, frames: Tensor) -> dict[str, Tensor]:
    """{"latents": (C, F, h, w)}, the mode of the posterior, standardised as by Wan's own VAE (NVlabs/Sana
    diffusion/model/builder.py ``vae_encode``)."""
    return {"latents": standardised(likeliest(encoder, pixels(encoder, frames)), encoder.model.config)[0]}


def encode_prompt(encoder: Encoder, captions: list[str]) -> dict[str, Tensor]:
    """Gemma 2's last states of plain captions without an instruction, padded, and their mask."""
    pipe = encoder.pipeline("SanaVideoPipeline")
    prompt, mask = pipe._get_gemma_prompt_embeds(
        captions, encoder.device, encoder.model.dtype, max_sequence_length=encoder.tokens
    )
    return {"prompt": prompt, "prompt_mask": mask.bool()}


FAMILY = SanaVideo
