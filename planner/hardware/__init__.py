"""The machine as it is: NVML, drivers, packages and what is wrong with them."""
