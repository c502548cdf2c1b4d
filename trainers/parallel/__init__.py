"""Training on several GPUs: engines, context parallelism, checkpoints and export.

Begin with `parallel` (`set_up`: which engine a strategy has). `local_engine` is what all engines have, `zero` is
DeepSpeed's; `checkpoint` and `state_files` keep what they hold, `lora_files` and `export` write what people use.
"""
