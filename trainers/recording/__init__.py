"""Recording a step with fake tensors: the recorder, CUDA's differences, and tapes.

Begin with `recorder` (how a step becomes events), then `compress` (events become a tape) and `tapes` (which tapes a
model has). `cuda_ops`, `op_table` and `fakes` make fake CPU tensors behave like CUDA tensors; `own` and `any_class` are
for the user's own models.
"""
