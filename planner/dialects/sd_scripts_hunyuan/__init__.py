"""sd-scripts' words for HunyuanImage 2.1."""
