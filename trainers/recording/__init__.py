"""Recording a step with fake tensors: the recorder, CUDA's differences, and tapes."""
