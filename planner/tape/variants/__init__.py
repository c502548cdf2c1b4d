"""The recordings of a model's denoiser: their names, when each answers for a configuration, and which of them exist.

Most of a strategy is a transformation of a recording (`planner.layout`). A few choices change the stream of operators
itself and need a recording of their own, a *variant*. Read the files in this order:

- `recorded_methods`: the method, that is what is trained and on which layers.
- `precision`: the formats of weights and adapters, and autocast.
- `torch_and_card`: what depends on the release of torch and on the card.
- `trainer_models`: trainers whose own models are recorded.
- `variant`: a variant's fields, its name, and the job and strategy to record it with.
- `choice`: which variant answers for a configuration, or why none does.
- `inventory`: the variants that are recorded by default, and those that are recorded on request.
"""
