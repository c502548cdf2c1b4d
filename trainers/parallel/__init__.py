"""Training on several GPUs: engines, context parallelism, checkpoints and export.

Start with `parallel`: its `set_up` chooses the engine for a strategy. `local_engine` has the base of all engines,
`zero` has DeepSpeed's. `checkpoint` and `state_files` save and restore training states; `lora_files` and `export` write
the weights that users load.
"""
