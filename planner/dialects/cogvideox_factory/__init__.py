"""cogvideox-factory's scripts for CogVideoX, which finetrainers keeps under examples/_legacy."""
