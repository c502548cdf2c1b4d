"""What sd-scripts and musubi-tuner, which are both kohya's, have alike."""
