"""Any transformer or UNet of diffusers, recorded from its config, its signature, its pipeline's source and dry runs."""
