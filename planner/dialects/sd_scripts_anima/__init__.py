"""sd-scripts' words for Anima."""
