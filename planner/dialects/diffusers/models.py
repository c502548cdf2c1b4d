"""The examples of diffusers that are read and written."""

AT = "diffusers 58eb52c"
SCRIPTS = {
    ("flux.1-dev", "lora"): "examples/dreambooth/train_dreambooth_lora_flux.py",
    ("flux.1-dev", "full"): "examples/dreambooth/train_dreambooth_flux.py",
    ("flux.1-schnell", "lora"): "examples/dreambooth/train_dreambooth_lora_flux.py",
    ("flux.1-schnell", "full"): "examples/dreambooth/train_dreambooth_flux.py",
    ("flux.1-kontext-dev", "lora"): "examples/dreambooth/train_dreambooth_lora_flux_kontext.py",
    ("flux.2-dev", "lora"): "examples/dreambooth/train_dreambooth_lora_flux2.py",
    ("flux.2-klein-4b", "lora"): "examples/dreambooth/train_dreambooth_lora_flux2_klein.py",
    ("flux.2-klein-9b", "lora"): "examples/dreambooth/train_dreambooth_lora_flux2_klein.py",
    ("hidream-i1", "lora"): "examples/dreambooth/train_dreambooth_lora_hidream.py",
    ("krea-2", "lora"): "examples/dreambooth/train_dreambooth_lora_krea2.py",
    ("lumina-image-2.0", "lora"): "examples/dreambooth/train_dreambooth_lora_lumina2.py",
    ("qwen-image", "lora"): "examples/dreambooth/train_dreambooth_lora_qwen_image.py",
    ("sana-1.6b", "lora"): "examples/dreambooth/train_dreambooth_lora_sana.py",
    ("sana1.5-1.6b", "lora"): "examples/dreambooth/train_dreambooth_lora_sana.py",
    ("sana1.5-4.8b", "lora"): "examples/dreambooth/train_dreambooth_lora_sana.py",
    ("sd3-medium", "lora"): "examples/dreambooth/train_dreambooth_lora_sd3.py",
    ("sd3.5-medium", "lora"): "examples/dreambooth/train_dreambooth_lora_sd3.py",
    ("sd3.5-large", "lora"): "examples/dreambooth/train_dreambooth_lora_sd3.py",
    ("sd3-medium", "full"): "examples/dreambooth/train_dreambooth_sd3.py",
    ("sd3.5-medium", "full"): "examples/dreambooth/train_dreambooth_sd3.py",
    ("sd3.5-large", "full"): "examples/dreambooth/train_dreambooth_sd3.py",
    ("z-image", "lora"): "examples/dreambooth/train_dreambooth_lora_z_image.py",
    ("z-image-turbo", "lora"): "examples/dreambooth/train_dreambooth_lora_z_image.py",
    ("cogvideox-2b", "lora"): "examples/cogvideo/train_cogvideox_lora.py",
    ("cogvideox-5b", "lora"): "examples/cogvideo/train_cogvideox_lora.py",
    ("cogvideox-5b-i2v", "lora"): "examples/cogvideo/train_cogvideox_image_to_video_lora.py",
    ("sdxl", "lora"): "examples/dreambooth/train_dreambooth_lora_sdxl.py",
    ("sdxl", "full"): "examples/text_to_image/train_text_to_image_sdxl.py",
    ("sd1.5", "lora"): "examples/text_to_image/train_text_to_image_lora.py",
    ("sd1.5", "full"): "examples/text_to_image/train_text_to_image.py",
    ("sd2.1", "lora"): "examples/text_to_image/train_text_to_image_lora.py",
    ("sd2.1", "full"): "examples/text_to_image/train_text_to_image.py",
}
"""(model, method) -> its example."""

DREAMBOOTH = "examples/dreambooth/train_dreambooth.py"
READ_TOO = ("examples/text_to_image/train_text_to_image_lora_sdxl.py", DREAMBOOTH)
"""Examples that are read and not written."""
