"""diffusers' pipelines in a Python file, read as syntax tree and never run: group offload, model offload, VAE tiles.

Group offload's hooks are those of planner.layout.group_offload (read at 58eb52c, hooks/group_offloading.py), so that
nothing of its memory is written down here again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from planner.catalog import lookup
from planner.dialects.base.bindings import (
    Choice,
    Fields,
    Fixed,
    FunctionPair,
    InexpressibleError,
    Remark,
    Settings,
    UnsupportedValue,
    Value,
)
from planner.dialects.base.common_bindings import EXPANDABLE, our_defaults, require_model
from planner.dialects.base.dialect import Dialect, Invocation, Move
from planner.dialects.base.launchers import ALLOC_CONF
from planner.dialects.base.script import Script
from planner.spec.plan import Plan

CODE = "code:"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32"}
SHAPE = ("num_frames", "height", "width", "guidance_scale")


def read_script(script: Script) -> Invocation | None:
    """The settings of a Python file that builds a diffusers pipeline, read as a syntax tree; None for anything else."""
    if script.tree is None:
        return None
    reader = _Reader()
    reader.visit(script.tree)
    if not reader.settings.get(f"{CODE}from_pretrained"):
        return None
    settings = {"script": script.name, "gpus": 1, **reader.settings}
    return Invocation("diffusers-pipeline", settings, notes=script.notes)


class _Reader(ast.NodeVisitor):
    """Collects what a file says to pipelines and their parts, in the order it stands there."""

    def __init__(self) -> None:
        self.settings: Settings = {}
        self.values: dict[str, Any] = {}
        self.components: dict[str, str] = {}
        """variable -> the class it was made from"""

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _dotted(target.value) == "os.environ":
                text = str(self.value(node.value)).lower()
                if self.value(target.slice) in ALLOC_CONF and "expandable_segments:true" in text:
                    self.settings["env:expandable_segments"] = True
            if isinstance(target, ast.Name):
                value = self.value(node.value)
                if value is not None:
                    self.values[target.id] = value
                if isinstance(node.value, ast.Call):
                    self.components[target.id] = _dotted(node.value.func).partition(".")[0]

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = _dotted(node.func)
        *owners, method = name.split(".")
        owner = owners[-1] if owners else ""
        arguments = {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        if method == "from_pretrained":
            self._note_component(owner, node, arguments)
        elif method in ("apply_group_offloading", "enable_group_offload"):
            part = _dotted(node.args[0]).rpartition(".")[2] if method.startswith("apply") and node.args else owner
            self._note_group_offload(part, arguments)
        elif method in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
            self.settings[f"{CODE}{method}"] = True
        elif method in ("enable_tiling", "enable_vae_tiling", "enable_slicing", "enable_vae_slicing"):
            self.settings[f"{CODE}vae.enable_{method.rpartition('_')[2]}"] = True
        elif method == "to" and len(owners) == 1 and self._is_pipeline(owner):
            if any("cuda" in str(self.value(word)) for word in node.args):
                self.settings[f"{CODE}to_cuda"] = True
        elif self._is_pipeline(name):
            shape = {key: arguments[key] for key in SHAPE if isinstance(arguments.get(key), int | float)}
            self.settings |= {f"{CODE}{key}": value for key, value in shape.items()}

    def _is_pipeline(self, variable: str) -> bool:
        return self.components.get(variable, "").endswith("Pipeline")

    def _note_component(self, owner: str, node: ast.Call, arguments: dict[str, Any]) -> None:
        source = self.value(node.args[0]) if node.args else arguments.get("pretrained_model_name_or_path")
        dtype = DTYPES.get(str(arguments.get("torch_dtype", arguments.get("dtype"))).rpartition(".")[2])
        if owner.startswith("Autoencoder"):
            self.settings[f"{CODE}vae.torch_dtype"] = dtype or "fp32"
        elif owner.endswith("Pipeline"):
            self.settings[f"{CODE}from_pretrained"] = source or "?"
            self.settings[f"{CODE}torch_dtype"] = dtype or "fp32"

    def _note_group_offload(self, part: str, arguments: dict[str, Any]) -> None:
        kind = {"block_level": "block", "leaf_level": "leaf"}.get(
            str(arguments.get("offload_type", "block_level")), "block"
        )
        if part in ("pipe", "pipeline") or self._is_pipeline(part):
            part = "transformer"
        self.settings[f"{CODE}{part}.offload"] = kind
        for word in ("use_stream", "record_stream", "low_cpu_mem_usage", "num_blocks_per_group"):
            if arguments.get(word):
                self.settings[f"{CODE}{part}.{word}"] = arguments[word]

    def value(self, node: ast.AST) -> Any:
        """A constant, a variable that holds one, or a dotted name as text; None for anything else."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.values.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return _dotted(node)
        if isinstance(node, ast.Call) and _dotted(node.func).endswith("device") and node.args:
            return self.value(node.args[0])
        return None


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _model(settings: Settings) -> Fields:
    return {"model": lookup.model(require_model(settings, f"{CODE}from_pretrained")).name}


def _write_model(fields: Fields) -> Settings:
    names = [name for name in lookup.model(fields["model"]).aliases if "/" in name]
    diffusers = [name for name in names if name.lower().endswith("-diffusers")]
    return {f"{CODE}from_pretrained": (diffusers or names or [fields["model"]])[0]}


def _frames(settings: Settings) -> Fields:
    profile = lookup.model(_model(settings)["model"])
    return {"frames": settings.get(f"{CODE}num_frames", profile.shape.default_frames) if profile.kind == "video" else 1}


def _write_frames(fields: Fields) -> Settings:
    if lookup.model(fields["model"]).kind == "image":
        if fields["frames"] != 1:
            raise InexpressibleError(UnsupportedValue("frames", fields["frames"], 1, "the model makes images"))
        return {}
    return {f"{CODE}num_frames": fields["frames"]}


def _dtype(settings: Settings) -> Fields:
    """A VAE that is made by itself has its own format, else the pipeline's."""
    weights = settings.get(f"{CODE}torch_dtype", "fp32")
    text = weights if weights != "fp16" else "fp16"
    return {
        "weights_dtype": weights,
        "text_encoder_dtype": text,
        "vae_dtype": settings.get(f"{CODE}vae.torch_dtype", weights),
    }


def _write_dtype(fields: Fields) -> Settings:
    weights = fields["weights_dtype"]
    if weights not in ("fp32", "bf16", "fp16"):
        raise InexpressibleError(
            UnsupportedValue("weights_dtype", weights, "bf16", "quantised pipelines are not written")
        )
    if fields["text_encoder_dtype"] != weights:
        why = "one torch_dtype is for the pipeline"
        raise InexpressibleError(UnsupportedValue("text_encoder_dtype", fields["text_encoder_dtype"], weights, why))
    return {f"{CODE}torch_dtype": weights, f"{CODE}vae.torch_dtype": fields["vae_dtype"]}


def _where(settings: Settings) -> Fields:
    """What of the pipeline is on the GPU when: all of it, each part for its turn, or weights group by group."""
    offload = settings.get(f"{CODE}transformer.offload", "none")
    stream = bool(settings.get(f"{CODE}transformer.use_stream")) and offload != "none"
    if settings.get(f"{CODE}enable_sequential_cpu_offload"):
        offload, stream = "leaf", False
    residence = "cached"
    if settings.get(f"{CODE}enable_model_cpu_offload"):
        residence = "swapped"
    elif offload == "none" and settings.get(f"{CODE}to_cuda"):
        residence = "resident"
    text = "cached" if residence == "swapped" else residence
    return {"group_offload": offload, "group_offload_stream": stream, "text_encoder": text, "vae": residence}


def _write_where(fields: Fields) -> Settings:
    settings: Settings = {}
    if fields["group_offload"] != "none":
        settings[f"{CODE}transformer.offload"] = fields["group_offload"]
        if fields["group_offload_stream"]:
            settings[f"{CODE}transformer.use_stream"] = True
    elif fields["vae"] == "swapped":
        settings[f"{CODE}enable_model_cpu_offload"] = True
    elif fields["vae"] == "resident":
        settings[f"{CODE}to_cuda"] = True
    result = _where(settings)
    wrong = [name for name in result if result[name] != fields[name]]
    if wrong:
        why = "a pipeline is on the GPU whole, part by part, or its transformer group by group"
        raise InexpressibleError(*(UnsupportedValue(name, fields[name], result[name], why) for name in wrong))
    return settings


def _remarks(settings: Settings, fields: Fields) -> Iterator[Remark]:
    if settings.get(f"{CODE}to_cuda") and fields["group_offload"] != "none":
        yield Remark(".to('cuda')", "group offload moves the weights itself")
    blocks = settings.get(f"{CODE}transformer.num_blocks_per_group", 1)
    if fields["group_offload"] == "block" and fields["group_offload_stream"] and blocks != 1:
        yield Remark("num_blocks_per_group", "with use_stream there is one block in a group, whatever it says")


def _notes(settings: Settings, fields: Fields) -> Iterator[str]:
    kind, stream = fields["group_offload"], fields["group_offload_stream"]
    if kind == "leaf" and stream:
        yield (
            "leaf_level with use_stream: the corruption of #11041 was a missing synchronisation, fixed by #11097; "
            "it was never in a release (0.33.0, the first with group offload, has the fix)"
        )
    if kind == "block" and stream:
        yield "block_level with use_stream gave wrong images in diffusers 0.33 and 0.34 (#11981): use 0.35.0 or later"
    if stream:
        yield "use_stream keeps a pinned copy of every tensor, in powers of two: 1.5 times the weights in host RAM"
        yield "record_stream was wrong until 0.36.0 (#12721), with another fix in 0.37.0 (#13211)"
    blocks = settings.get(f"{CODE}transformer.num_blocks_per_group", 1)
    if kind == "block" and not stream and blocks != 1:
        yield f"num_blocks_per_group {blocks} of the transformer is estimated as 1"
    if f"{CODE}num_frames" not in settings and lookup.model(fields["model"]).kind == "video":
        yield f"{fields['frames']} frames, the model's usual length: the call does not say"
    if fields["vae_dtype"] == "fp32":
        yield "the VAE decodes in fp32: twice the memory of bf16"
    if lookup.model(fields["model"]).trained_with("diffusers-pipeline", "shift-by-size"):
        yield "flow_shift is 3.0 at 480p and 5.0 at 720p for Wan 2.1"


def files(plan: Plan, settings: Settings) -> dict[str, str]:
    """name -> text of a Python file that samples."""
    get = {name.removeprefix(CODE): value for name, value in settings.items() if name.startswith(CODE)}
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    vae = lookup.model(plan.job.model).vae.class_name
    allocator = ["import os", "", f"os.environ[{ALLOC_CONF[0]!r}] = 'expandable_segments:True'", ""]
    lines = [
        *(allocator if plan.strategy.expandable_segments else ()),
        "import torch",
        f"from diffusers import {vae}, DiffusionPipeline",
        "",
        f"model = {get['from_pretrained']!r}",
        f"vae = {vae}.from_pretrained(model, subfolder='vae', torch_dtype=torch.{names[get['vae.torch_dtype']]})",
        f"pipe = DiffusionPipeline.from_pretrained(model, vae=vae, torch_dtype=torch.{names[get['torch_dtype']]})",
    ]
    if "transformer.offload" in get:
        stream = ", use_stream=True" if "transformer.use_stream" in get else ""
        lines.append(
            "pipe.transformer.enable_group_offload(onload_device=torch.device('cuda'), "
            f"offload_device=torch.device('cpu'), offload_type='{get['transformer.offload']}_level'{stream})"
        )
    lines += [f"pipe.{name}()" for name in ("enable_model_cpu_offload",) if name in get]
    lines += [f"pipe.{name}()" for name in ("vae.enable_tiling", "vae.enable_slicing") if name in get]
    lines += ["pipe.to('cuda')"] if "to_cuda" in get else []
    shape = ", ".join(f"{name}={get[name]}" for name in SHAPE if name in get)
    lines.append(f"pipe(prompt='a cat walks', {shape})")
    return {"infer.py": "\n".join(lines) + "\n"}


DIALECT = Dialect(
    name="diffusers-pipeline",
    title="diffusers' pipelines (a Python file)",
    source="https://github.com/huggingface/diffusers at 58eb52c",
    scripts=(),
    table=(
        FunctionPair(("model",), (f"{CODE}from_pretrained",), _model, _write_model, {"model": "from_pretrained"}),
        Fixed("method", "sample", "a pipeline samples"),
        FunctionPair(("frames",), (f"{CODE}num_frames",), _frames, _write_frames, {"frames": "num_frames"}),
        Value("height", f"{CODE}height", None),
        Value("width", f"{CODE}width", None),
        FunctionPair(
            ("weights_dtype", "text_encoder_dtype", "vae_dtype"),
            (f"{CODE}torch_dtype", f"{CODE}vae.torch_dtype"),
            _dtype,
            _write_dtype,
            {"weights_dtype": "fp32, bf16, fp16", "text_encoder_dtype": "as the weights", "vae_dtype": "torch_dtype"},
        ),
        FunctionPair(
            ("group_offload", "group_offload_stream", "text_encoder", "vae"),
            (
                *(f"{CODE}transformer.offload", f"{CODE}transformer.use_stream"),
                *(f"{CODE}enable_model_cpu_offload", f"{CODE}to_cuda"),
            ),
            _where,
            _write_where,
            {
                "group_offload": "none, block, leaf",
                "group_offload_stream": "use_stream",
                "text_encoder": "resident (.to), cached",
                "vae": "resident (.to), cached, swapped (enable_model_cpu_offload)",
            },
        ),
        Choice("vae_tiling", {False: {}, True: {f"{CODE}vae.enable_tiling": True}}),
        Choice("vae_slicing", {False: {}, True: {f"{CODE}vae.enable_slicing": True}}),
        EXPANDABLE,
        Fixed("gpus", 1, "a pipeline samples on one GPU"),
        Fixed("nodes", 1, "a pipeline samples on one GPU"),
        Fixed("autocast", "none", "pipelines compute in the weights' own format"),
        *our_defaults("batch_size", "experts", "trainable", "lora_rank", "lora_targets", "lora_dropout", "buckets"),
        *our_defaults("text_tokens", "references", "validation", "compute_dtype", "master_weights", "adapter_dtype"),
        *our_defaults(
            "gradient_checkpointing", "checkpointed_blocks", "optimizer", "optimizer_step", "gradient_accumulation"
        ),
        *our_defaults("ema", "sharding", "grad_buckets", "offload_optimizer", "offload_gradients", "offload_params"),
        *our_defaults(
            "swap_blocks",
            "inactive_expert",
            "validation_mode",
            "attention",
            "compile",
            "context_parallel",
            "adapter_inputs",
            "nested_checkpointing",
            "fsdp_replicas",
        ),
    ),
    read_script=read_script,
    remarks=_remarks,
    notes=_notes,
    moves=(
        Move(
            {"vae_dtype": "bf16"},
            "the VAE decodes in bf16",
            words_for=lambda settings: ["vae torch_dtype=torch.bfloat16"],
        ),
        Move(
            {"vae_tiling": True},
            "tiles are blended where they meet",
            words_for=lambda settings: ["pipe.vae.enable_tiling()"],
        ),
        Move(
            {"text_encoder": "cached", "vae": "swapped"},
            "each component moves to the GPU only while it runs",
            words_for=lambda settings: ["pipe.enable_model_cpu_offload()"],
            when=lambda fields: fields["group_offload"] == "none",
        ),
        Move(
            {"group_offload_stream": False},
            "slower: no prefetch",
            words_for=lambda settings: ["use_stream=False"],
            when=lambda fields: bool(fields["group_offload_stream"]),
        ),
        *(
            Move(
                {"group_offload": kind, "text_encoder": "cached", "vae": "cached"},
                "weights stay in host RAM and are loaded when needed",
                words_for=lambda settings, kind=kind: [  # type: ignore[misc]  # mypy infers none with a default
                    f"pipe.transformer.enable_group_offload(torch.device('cuda'), offload_type='{kind}_level')"
                ],
                when=lambda fields: fields["group_offload"] == "none",
            )
            for kind in ("block", "leaf")
        ),
    ),
    files=files,
)
