"""Text encoders that are trained beside the model, or that its gradients pass: adapters on them, or all of their
weights.

Adapters are held to rehearsals of sd-scripts (`profiles/rehearsals/commands/sd-scripts.jsonl`), whole ones to none.
"""

from __future__ import annotations

from planner.catalog.profiles import TextEncoder
from planner.layout.adapters import LinearLayer
from planner.layout.run import Run, Transform

HALF, SINGLE = 2, 4


def adapters_on_text_encoders(run: Run) -> None:
    """Adapters on every layer of the text encoders (networks/lora.py TEXT_ENCODER_TARGET_REPLACE_MODULE): their
    weights, gradients and states, and what autograd keeps of the encoders.

    With checkpointing that is each layer's input, and gradients of the embeddings, which are made to require them and
    whom no optimizer clears (train_network.py ``prepare_text_encoder_grad_ckpt_workaround``)."""
    encoders, rank = run.facts.model.text_encoders, run.job.lora_rank
    prompts = _prompts(run)
    each = SINGLE if run.strategy.adapter_dtype == "fp32" else HALF
    trained = each * rank * sum(_layer_elements(encoder) * _layers(encoder) for encoder in encoders)
    run.add(run.load, trained, "weight", "adapters on text encoders")
    _states_and_gradients(run, trained, "the text encoders' adapters")
    checkpointed = run.strategy.gradient_checkpointing == "full"
    if checkpointed:
        tables = sum(
            HALF * encoder.config["hidden_size"] * (encoder.config["vocab_size"] + encoder.max_tokens)
            for encoder in encoders
        )
        run.add(run.optimizer_first, tables, "gradient", "gradients of the embeddings", at=0)
    kept = sum(_kept_per_layer(encoder, checkpointed, HALF) * _used(encoder, run) for encoder in encoders)
    keep_beside(run, prompts * kept, "kept of the text encoders")


def changes_on_text_encoders(each: int) -> Transform:
    """The term of adapters there that make the changes of weights whole, of which autograd keeps ``each`` bytes a
    number. With checkpointing a layer's are made again when all of the model's are gone."""

    def term(run: Run) -> None:
        """Changes of the text encoders' weights."""
        if run.strategy.gradient_checkpointing == "none":
            encoders = run.facts.model.text_encoders
            numbers = sum(_layer_matrices(encoder) * _used(encoder, run) for encoder in encoders)
            keep_beside(run, each * numbers, "changes of the text encoders' weights")

    return term


def text_encoders_whole(run: Run) -> None:
    """All of the text encoders is trained: gradients and states like the model's own, and what autograd keeps of them.

    Of SDXL's CLIP-L the last layer and the norm behind it give nothing that the model takes, and get no gradient
    (sd-scripts sdxl_train.py ``text_encoder1.text_model.encoder.layers[-1].requires_grad_(False)``).
    """
    encoders = run.facts.model.text_encoders
    each = SINGLE if run.strategy.weights_dtype == "fp32" else HALF
    unused = sum(_layer_parameters(encoder) * (_layers(encoder) - _used(encoder, run)) for encoder in encoders)
    trained = each * (sum(encoder.parameters for encoder in encoders) - unused)
    _states_and_gradients(run, trained, "the text encoders")
    checkpointed = run.strategy.gradient_checkpointing == "full"
    computed = SINGLE if each == SINGLE and run.strategy.autocast == "none" else HALF
    kept = sum(_kept_per_layer(encoder, checkpointed, computed) * _used(encoder, run) for encoder in encoders)
    keep_beside(run, _prompts(run) * kept, "kept of the text encoders")


def _states_and_gradients(run: Run, trained: int, whose: str) -> None:
    """What the optimizer keeps of so many bytes of weights, by the share that it keeps of the model's own, and their
    gradients; with an optimizer that steps inside backward none of these stays."""
    own = run.total_bytes(run.named("gradient").values())
    states = run.total_bytes(run.named("optimizer").values())
    run.add(run.optimizer_first, states * trained // own, "optimizer", f"states of {whose}")
    if run.strategy.optimizer_step == "backward":
        return
    gradient = run.new(trained, "gradient", f"gradients of {whose}")
    for stage in filter(None, (run.first_step, run.step)):
        run.place(stage, [gradient], "backward of the text encoders")
    for stage in (run.optimizer_first, run.optimizer):
        run.free(stage, [gradient])


def _prompts(run: Run) -> int:
    """Longer captions are encoded in chunks of 75 tokens, each between two marks (sd-scripts
    library/strategy_base.py)."""
    return run.grid["B"] * -(-(run.grid["T"] - 2) // 75)


def _layers(encoder: TextEncoder) -> int:
    return int(encoder.config["num_hidden_layers"])


def _used(encoder: TextEncoder, run: Run) -> int:
    """Layers through which the gradient goes: SDXL's CLIP-L gives what its last but one made (library/train_util.py
    ``get_hidden_states_sdxl``)."""
    pooled = encoder.class_name.endswith("Projection")
    return _layers(encoder) - (0 if pooled or len(run.facts.model.text_encoders) == 1 else 1)


def _layer_elements(encoder: TextEncoder) -> int:
    """Of a layer's adapters for each rank: queries, keys, values and output, and the two layers of its MLP."""
    width, inner = encoder.config["hidden_size"], encoder.config["intermediate_size"]
    return int(4 * (width + width) + 2 * (width + inner))


def _layer_matrices(encoder: TextEncoder) -> int:
    """Numbers of the six matrices of a layer."""
    width, inner = encoder.config["hidden_size"], encoder.config["intermediate_size"]
    return int(4 * width * width + 2 * width * inner)


def encoder_layers(encoder: TextEncoder) -> list[LinearLayer]:
    """All linear layers of an encoder's blocks."""
    width, inner = encoder.config["hidden_size"], encoder.config["intermediate_size"]
    sides = [(width, width)] * 4 + [(inner, width), (width, inner)]
    return [LinearLayer(rows, columns, None) for rows, columns in sides] * _layers(encoder)


def _layer_parameters(encoder: TextEncoder) -> int:
    """Of a layer: queries, keys, values and output, the two layers of its MLP, each with a bias, and two norms."""
    width, inner = encoder.config["hidden_size"], encoder.config["intermediate_size"]
    return int(4 * width * (width + 1) + 2 * width * inner + inner + width + 4 * width)


def _kept_per_layer(encoder: TextEncoder, checkpointed: bool, each: int) -> int:
    """Bytes that a CLIP layer keeps of one sample (transformers modeling_clip.py ``CLIPEncoderLayer``), computed in
    numbers of ``each`` bytes: under autocast in 16 bits.

    Two norms' inputs in fp32; what the adapters of queries, keys, values and of the MLP read, each cast apart; queries,
    keys, values and the result of attention; what the activation reads and gives, and the sigmoid of ``quick_gelu``.
    """
    tokens, width, inner = encoder.max_tokens, encoder.config["hidden_size"], encoder.config["intermediate_size"]
    if checkpointed:
        return int(each * tokens * width)
    wide = 3 if encoder.config["hidden_act"] == "quick_gelu" else 2
    return int(tokens * (2 * SINGLE * width + (4 + 4) * each * width + wide * each * inner))


def keep_beside(run: Run, nbytes: int, name: str) -> None:
    """Something that a whole step keeps beside what is recorded."""
    for stage in filter(None, (run.first_step, run.step, run.accumulate)):
        kept = run.new(nbytes, "activation", name)
        run.place(stage, [kept], name, at=0)
        run.free(stage, [kept])


KEPT_BY_CONDITIONER = 24
"""Tensors as wide as the conditioner that autograd keeps of each of its layers (``saved_tensors_hooks`` over diffusers'
AnimaTextConditioner: 145 MiB of 512 tokens)."""


def keep_of_conditioner(trainer: str, run: Run) -> None:
    """Keeps what gradients that pass through a conditioner in the model need, of a trainer that has one there."""
    model = run.facts.model
    if model.trained_with(trainer, "last-encoder-in-model"):
        sizes = model.text_encoders[-1].config
        tensor = HALF * run.grid["B"] * run.grid["T"] * sizes["model_dim"]
        keep_beside(run, KEPT_BY_CONDITIONER * sizes["num_layers"] * tensor, "kept of the conditioner")
