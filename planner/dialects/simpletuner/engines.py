"""What splits SimpleTuner's training across GPUs, both ways: DDP, DeepSpeed by ``deepspeed_config`` or the launcher,
and FSDP2 by ``fsdp_enable``; and the number formats and optimizers that go with each.

Read at bc8e6ab: helpers/training/trainer.py (``_load_fsdp_plugin``, ``move_models``, ``init_prepare_models``),
helpers/configuration/cmd_args.py and helpers/training/optimizer_param.py; accelerate 1.15 (``fsdp2_prepare_model``).
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.dialect import Move
from planner.dialects.base.engine_files.fsdp_launch import LOADING, OFFLOAD, POLICY, VERSION, Units
from planner.dialects.base.launchers import ON_HOST, engine, several_gpus
from planner.dialects.base.values import integer
from planner.dialects.simpletuner import block_checkpoints, deepspeed_config, lycoris_config, number_formats
from planner.dialects.simpletuner.defaults import is_true
from planner.dialects.simpletuner.models import CONFIG, family_of, of, write_model
from planner.errors import VplanError, quoted
from planner.layout.trainer_terms.simpletuner_engines import FSDP_WHOLE
from planner.spec.job import QUANTISED, SPLIT
from planner.spec.plan import Plan
from planner.spec.rules import DEEPSPEED

BLOCKS = {
    "chroma": ("ChromaTransformerBlock", "ChromaSingleTransformerBlock"),
    "flux": ("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    "flux2": ("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    "ltxvideo": ("LTXVideoTransformerBlock",),
    "qwen_image": ("QwenImageTransformerBlock",),
    "wan": ("WanTransformerBlock",),
    "z_image": ("ZImageTransformerBlock",),
}
"""Families whose model names its blocks, and nothing else, as what FSDP gathers together (``_no_split_modules`` in
helpers/models/*/transformer.py)."""

NOT_CALLED = ("sd3",)
"""Families whose model runs the parts of its blocks and never a block, so that FSDP gathers none: the first forward
ends at a product of a tensor and a share (helpers/models/sd3/transformer.py ``_sd3_apply_joint_transformer_block``;
rehearsed)."""

FSDP, LOADED_BY_ONE = "fsdp_enable", "fsdp_cpu_ram_efficient_loading"
OFFLOADED, RECOMPUTED = "fsdp_cpu_offload", "fsdp_activation_checkpointing"
RESHARDED, POLICY_KEY, CLASSES_KEY = (
    "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
)

KEYS = (FSDP, "fsdp_version", RESHARDED, POLICY_KEY, CLASSES_KEY, LOADED_BY_ONE, OFFLOADED, deepspeed_config.KEY)
"""Keys of the config by which it is split."""

STEPS_UNDER_FSDP = ("torch-adamw",)
"""``optimizer``s whose step is priced over FSDP2's shares. adamw_bf16 wants 16 bits where accelerate makes fp32
(``AdamWBF16.step``), and bnb-* and optimi-* give way to adamw_schedulefree (``FSDP2_INCOMPATIBLE_PREFIXES``)."""


def launched(settings: Settings) -> Settings:
    """The launcher's settings that the keys of FSDP stand for, as accelerate's plugin has them. Raises a VplanError for
    what is not priced."""
    if not is_true(of(settings, FSDP)):
        if settings.get("launch:--use_fsdp"):
            raise VplanError("FSDP by accelerate's launch is not priced", f"write {FSDP}: true into the config")
        return {}
    if deepspeed_config.USED in settings:
        fault = f"{FSDP} beside DeepSpeed ends before training (SimpleTuner's helpers/configuration/cmd_args.py:1229)"
        raise VplanError(fault, f"leave {FSDP} or {deepspeed_config.KEY} out")
    if str(of(settings, "fsdp_version") or 2) != "2":
        raise VplanError("fsdp_version 1 is not priced", "leave fsdp_version out: SimpleTuner's default is 2")
    if str(of(settings, RESHARDED)).lower() == "false":
        fault = f"{RESHARDED} false keeps every block gathered until its backward, which is not priced"
        raise VplanError(fault, f"leave {RESHARDED} out")
    policy = str(of(settings, POLICY_KEY) or "TRANSFORMER_BASED_WRAP").upper()
    offload = "true" if is_true(of(settings, OFFLOADED)) else "false"
    loading = "true" if is_true(of(settings, LOADED_BY_ONE)) else "false"
    return {"launch:--use_fsdp": True, VERSION: "2", POLICY: policy, OFFLOAD: offload, LOADING: loading}


def is_split(settings: Settings) -> bool:
    """Whether FSDP or DeepSpeed trains."""
    return is_true(of(settings, FSDP)) or bool(settings.get(deepspeed_config.USED))


def _units(settings: Settings) -> Units | str:
    family = family_of(settings)
    if family in NOT_CALLED:
        return f"SimpleTuner's {family} runs the parts of its blocks, which are then not gathered, and ends"
    if family not in BLOCKS:
        return f"which modules of {family} are gathered together is no list of its blocks"
    named = [name.strip() for name in str(of(settings, CLASSES_KEY) or "").split(",") if name.strip()]
    if other := [name for name in named if name not in BLOCKS[family]]:
        return f"{CLASSES_KEY} names {', '.join(other)} beside its blocks"
    return Units(BLOCKS[family], named=True, adapters=of(settings, "model_type") == "lora")


def _context(fields: Fields) -> Settings:
    """What `_units` and the formats read, of other bindings."""
    own = {"model_type": fields["method"], "optimizer": number_formats.word_of(fields)}
    own[FSDP] = fields["sharding"] == "fsdp"
    return write_model(fields) | {f"{CONFIG}{name}": value for name, value in own.items()}


def _write_formats(fields: Fields) -> Settings:
    if fields["sharding"] != "fsdp":
        return number_formats.write_formats(fields)
    if fields["weights_dtype"] in QUANTISED:
        why = "FSDP over a quantised base is not priced"
        raise InexpressibleError(UnsupportedValue("weights_dtype", fields["weights_dtype"], "bf16", why))
    return {f"{CONFIG}mixed_precision": "bf16"}


WORDS: Mapping[str, str] = {
    "sharding": "none, ddp, fsdp by fsdp_enable, zero-1, zero-2, zero-3 by deepspeed_config",
    "weights_dtype": "bf16, int8, fp8, nf4",
    "adapter_dtype": "bf16, fp32",
    "autocast": "mixed_precision",
    "master_weights": "none, fp32 by deepspeed_config",
    **dict.fromkeys(("offload_optimizer", "offload_gradients"), "deepspeed_config, fsdp_cpu_offload"),
    "offload_params": "deepspeed_config, fsdp_cpu_offload",
}

_SHARED = engine(number_formats.formats_of, _write_formats, WORDS, _units, context=_context)

SETTINGS = (
    *_SHARED.settings,
    *(f"{CONFIG}{name}" for name in ("base_model_precision", "quantize_via", "mixed_precision", *KEYS)),
)


def engine_of(settings: Settings) -> Fields:
    """The fields of `ENGINE`. Raises a VplanError for what is not priced under an engine."""
    _check(settings)
    return _SHARED.to_fields(settings | launched(settings))


def write_engine(fields: Fields) -> Settings:
    """The settings for an engine and its formats; raises an InexpressibleError. Those of DeepSpeed have the launcher's
    names: `config_keys` writes them into the config."""
    written = _SHARED.to_settings(fields)
    if fields["sharding"] != "fsdp":
        return written
    own: Settings = {f"{CONFIG}{FSDP}": True}
    own |= {f"{CONFIG}{OFFLOADED}": True} if fields["offload_params"] == "cpu" else {}
    if fields.get("version") != FSDP_WHOLE:
        own[f"{CONFIG}{LOADED_BY_ONE}"] = True
    return own | {name: value for name, value in written.items() if not name.startswith("launch:")}


def _check(settings: Settings) -> None:
    """Raises a VplanError for what nobody understood yet of a split training."""
    if not is_split(settings):
        return
    by = "FSDP" if is_true(of(settings, FSDP)) else "DeepSpeed"
    for name in ("ramtorch", "musubi_blocks_to_swap", "use_ema"):
        if name == "use_ema" and by == "DeepSpeed" and settings.get(deepspeed_config.STAGE) != 3:
            continue
        if is_true(of(settings, name)) or (str(of(settings, name) or "0").isdigit() and int(of(settings, name) or 0)):
            raise VplanError(f"{name} with {by} is not priced", f"leave {name} out")
    if lycoris_config.is_lycoris(settings):
        raise VplanError(f"lora_type lycoris with {by} is not priced", "use lora_type standard")
    if by == "DeepSpeed":
        _check_deepspeed(settings)
    else:
        _check_fsdp(settings)


def _check_deepspeed(settings: Settings) -> None:
    precision = str(of(settings, "mixed_precision"))
    if precision != "bf16":
        raise VplanError(f"mixed_precision {precision} with DeepSpeed is not priced", "use mixed_precision bf16")
    if settings.get(deepspeed_config.STAGE, 2) == 0:
        what = f"{deepspeed_config.KEY} without a stage of zero_optimization, or with stage 0, splits nothing"
        raise VplanError(f"{what}, and is not priced", "write a stage from 1 to 3")
    base = str(of(settings, "base_model_precision"))
    if base != "no_change":
        raise VplanError(f"base_model_precision {base} with DeepSpeed is not priced", "leave one of both out")


def _check_fsdp(settings: Settings) -> None:
    if isinstance(why := _units(settings), str):
        raise VplanError(f"FSDP is not priced here: {why}", f"leave {FSDP} out")
    base, optimizer = (str(of(settings, name)) for name in ("base_model_precision", "optimizer"))
    if base.endswith("-quanto"):
        where = "SimpleTuner's helpers/configuration/cmd_args.py:1284"
        raise VplanError(
            f"base_model_precision {base} with FSDP ends before training ({where})", "leave one of both out"
        )
    if base != "no_change":
        raise VplanError(f"base_model_precision {base} with FSDP is not priced", "leave one of both out")
    if optimizer not in STEPS_UNDER_FSDP:
        if optimizer == number_formats.LOOPS:
            what = "ends in the first step with FSDP, which trains in fp32: it asserts 16 bits"
        elif optimizer.startswith(("bnb-", "optimi-")):
            what = "gives way to adamw_schedulefree with FSDP, which is not priced"
        else:
            what = "with FSDP is not priced"
        raise VplanError(f"optimizer {quoted(optimizer)} {what}", f"use {', '.join(STEPS_UNDER_FSDP)}")


def checkpointing_of(settings: Settings) -> Fields:
    """The fields of checkpointing: ``fsdp_activation_checkpointing`` wraps each block once and turns the model's own
    off (``_load_fsdp_plugin``)."""
    if is_true(of(settings, FSDP)) and is_true(of(settings, RECOMPUTED)):
        return {"gradient_checkpointing": "full", "checkpointed_blocks": None}
    return block_checkpoints.checkpointing_of(settings)


def optimizer_of(settings: Settings) -> Fields:
    """The fields `optimizer` and `optimizer_step`."""
    if settings.get(deepspeed_config.USED):
        return deepspeed_config.optimizer_of(settings)
    return number_formats.optimizer_of(settings)


def write_optimizer(fields: Fields) -> Settings:
    """The setting of the optimizer. Raises an InexpressibleError for others."""
    if fields["sharding"] not in SPLIT:
        return number_formats.write_optimizer(fields)
    zero = fields["sharding"] != "fsdp"
    if zero and not several_gpus(fields):
        why = "on one GPU `simpletuner train` starts a plain process, to which accelerate gives no process group"
        raise InexpressibleError(UnsupportedValue("sharding", fields["sharding"], "none", why))
    on_gpu = zero and fields["offload_optimizer"] == "none"
    steps = ("fused", "foreach") if on_gpu else ("foreach",)
    step = fields["optimizer_step"] if fields["optimizer_step"] in steps else steps[0]
    why = "DeepSpeed's own AdamW steps, or torch's" if zero else "torch's AdamW alone steps over FSDP's shares"
    expected = {"optimizer": "adamw", "optimizer_step": step}
    wrong = [
        UnsupportedValue(name, fields[name], value, why) for name, value in expected.items() if fields[name] != value
    ]
    if wrong:
        raise InexpressibleError(*wrong)
    own: Settings = {deepspeed_config.OWN_ADAM: True} if on_gpu and step == "foreach" else {}
    return own | {f"{CONFIG}optimizer": number_formats.LOOPS if zero else STEPS_UNDER_FSDP[0]}


def version_of(settings: Settings) -> str:
    """Of the memory terms under FSDP."""
    if not is_true(of(settings, FSDP)):
        return ""
    return "" if is_true(of(settings, LOADED_BY_ONE)) else FSDP_WHOLE


def config_keys(plan: Plan) -> Settings:
    """What the config says of DeepSpeed for a plan; nothing without it."""
    strategy = plan.strategy
    if not strategy.sharding.startswith("zero"):
        return {}
    zero: dict[str, object] = {"stage": int(strategy.sharding[-1])}
    for name, where in (("optimizer", strategy.offload_optimizer), ("param", strategy.offload_params)):
        if where != "none":
            zero[f"offload_{name}"] = {"device": where}
    table: dict[str, object] = {"zero_optimization": zero}
    if strategy.offload_optimizer == "none" and strategy.optimizer_step == "foreach":
        table["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    return {deepspeed_config.KEY: table}


def _by_deepspeed(stage: int, what: str, on_host: bool = False) -> Move:
    """A stage of DeepSpeed for full training, on several GPUs: on one ``simpletuner train`` starts a plain process, to
    which accelerate gives no process group for it (accelerate 1.15 state.py, LOCAL_RANK)."""
    fields: Fields = {"sharding": f"zero-{stage}", "optimizer": "adamw", "optimizer_step": "fused", **DEEPSPEED}
    table = f'"stage": {stage}'
    if on_host:
        fields |= {"optimizer_step": "foreach", **ON_HOST}
        table += ', "offload_optimizer": {"device": "cpu"}'
    words = [f'{deepspeed_config.KEY}: {{"zero_optimization": {{{table}}}}}']

    def said(settings: Settings) -> list[str]:
        warms = integer(of(settings, deepspeed_config.WARMUP) or 0, deepspeed_config.WARMUP)
        return words if warms else [*words, f"{deepspeed_config.WARMUP}: 100"]

    return Move(
        fields,
        what,
        words_for=said,
        when=lambda now: _may_split(now) and now["method"] == "full" and several_gpus(now),
    )


def _may_split(fields: Fields) -> bool:
    return not fields["swap_blocks"] and fields["ema"] == "none" and fields["sharding"] != "fsdp"


MOVES = (
    _by_deepspeed(2, "gradients and states are sharded across the GPUs, with an fp32 master"),
    _by_deepspeed(3, "weights are gathered for every block"),
    _by_deepspeed(2, "the optimizer steps in host RAM", on_host=True),
    Move(
        {"version": ""},
        "one process loads for all, and what is trained waits in host RAM",
        words_for=lambda settings: [f"{LOADED_BY_ONE}: true"],
        when=lambda fields: fields["version"] == FSDP_WHOLE,
    ),
)
