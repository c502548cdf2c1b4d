"""Derives the profile of a model whose class no bundled model has, from its config, its class and its pipeline's
source.

Its arguments come from `argument_search`, its lengths from `length_sums`, its blocks from `block_lists`. Every
assumption is written down in words and shown with each estimate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn import Linear, RMSNorm

from planner.catalog.diffusers_folder import CONFIG, Config, Source, architecture
from planner.catalog.forward_call import ANY, FAMILY, LAST, ForwardCall
from planner.catalog.forward_inputs import BLOCKS, SAMPLES, leaves, length, parse_argument
from planner.catalog.own_code import is_own
from planner.catalog.own_inputs import OwnInputs
from planner.catalog.profiles import ModelProfile, Stack
from planner.catalog.traits import Traits
from planner.errors import VplanError, quoted
from planner.tape.format import HEAD, TAIL
from trainers.families.common.model_classes import build, class_of
from trainers.recording import own, tapes
from trainers.recording.any_class.argument_search import (
    ArgumentSearch,
    FoundArguments,
    MissingArgument,
    tensors_in,
)
from trainers.recording.any_class.block_lists import (
    BlockList,
    block_lists,
    built,
    in_running_order,
    list_names,
    stand_for_all,
)
from trainers.recording.any_class.candidates import MAIN, ClassFacts, Patch
from trainers.recording.any_class.dry_run import FakeModel
from trainers.recording.any_class.length_sums import NoRun, with_sums
from trainers.recording.any_class.pipeline_source import PipelineFacts, is_video_class, pipelines_of
from trainers.recording.any_class.vae import Latents, LatentSpace, latent_space

ADAPTED = ("to_q", "to_k", "to_v", "to_out.0")
"""The layers that diffusers' examples adapt (examples/dreambooth, train_dreambooth_lora_*.py)."""
DEFAULT_TEXT_TOKENS = 512
IMAGE_SIZE, CLIP_SIZE, CLIP_FRAMES = (1024, 1024), (480, 832), 49
SHALLOW = 2
"""Blocks of each list in dry runs: a first and a last one."""


def model_classes() -> dict[str, Any]:
    """The installed diffusers' transformers and UNets, by name. Class names from files are only looked up here."""
    import diffusers
    from diffusers import ModelMixin

    found = {}
    for name in dir(diffusers.models):
        model_class = getattr(diffusers, name, None)
        if not isinstance(model_class, type) or not issubclass(model_class, ModelMixin):
            continue
        if model_class.__module__.startswith(("diffusers.models.transformers", "diffusers.models.unets")):
            found[name] = model_class
    return found


def derive(source: Source, name: str, inputs: OwnInputs) -> own.Derived:
    """The profile of a model of any class. Raises a VplanError that says what is missing and how to provide it."""
    classes = {} if is_own(source.class_name) else model_classes()
    if not is_own(source.class_name) and source.class_name not in classes:
        import diffusers

        fault = f"diffusers {diffusers.__version__} has no transformer or UNet {quoted(source.class_name)}"
        raise VplanError(fault, "update diffusers, or correct _class_name in the file")
    named = class_of(source.class_name)
    config = own.complete(source.class_name, architecture(source.config), CONFIG)
    parameters = own.count(lambda: build(named, config), CONFIG, source.class_name)
    description = _Description(named, config, source, inputs)
    profile = description.profile(name, parameters)
    return own.Derived(profile, ForwardCall.read(profile.inputs).assumed)


class _Description:
    """What is found out about one model."""

    def __init__(self, model_class: Any, config: Config, source: Source, inputs: OwnInputs) -> None:
        self.model_class, self.config, self.source = model_class, config, source
        self.said = inputs
        self.inputs = inputs.beside(OwnInputs.of_class(source.class_name))
        found = pipelines_of(source.class_name)
        self.pipeline: PipelineFacts | None = found[0] if found else None
        self.assumed: list[str] = []
        model = built(model_class, config)
        self.lists = block_lists(model_class, config, model)
        self.says_blocks = False
        self.is_video = self._is_video()
        self.answer = self._answer()

    # ---- how it is called

    def _is_video(self) -> bool:
        if self.inputs.kind:
            return self.inputs.kind == "video"
        from_pipeline = self.pipeline is not None and "num_frames" in self.pipeline.defaults
        return from_pipeline or is_video_class(self.source.class_name)

    @property
    def patch(self) -> Patch:
        """The model's patch, from its config; for a UNet, whose levels halve the image, a cell of its lowest level."""
        several = self.config.get("all_patch_size")  # a class with several patch embeddings: the first is used
        size = self.config.get("patch_size", several[0] if isinstance(several, list) and several else None)
        levels = self.config.get("block_out_channels")
        if self.inputs.patch:
            return Patch(*self.inputs.patch)
        if isinstance(size, list) and 1 <= len(size) <= 3:
            return Patch(*[1] * (3 - len(size)), *size)
        if isinstance(size, int) and size > 0:
            frames = self.config.get("patch_size_t", self.config.get("patch_size_temporal"))
            return Patch(frames if isinstance(frames, int) else 1, size, size)
        if isinstance(levels, list) and levels:
            side = 2 ** (len(levels) - 1)
            return Patch(1, side, side)
        return Patch(1, 1, 1)

    def _answer(self) -> FoundArguments:
        shallow = dict(self.config)
        for entry in self.lists:
            if isinstance(self.config.get(entry.depth_key), int):
                shallow[entry.depth_key] = min(SHALLOW, self.config[entry.depth_key])
        whole = built(self.model_class, self.config)
        try:
            model = built(self.model_class, shallow)
            if list_names(model) != list_names(whole):  # for example, adapters after every fifth block
                model = whole
        except own.REFUSALS:  # some keys must be consistent with each other
            model = whole
        blocks = sum(len(list(model.get_submodule(entry.name).children())) for entry in self.lists)
        self.fake = FakeModel(model)
        facts = ClassFacts(self.config, self.patch, not self.is_video, self.pipeline, self.inputs.inputs, blocks)
        found = ArgumentSearch(self.fake, facts).find()
        if isinstance(found, FoundArguments):
            every = sum(entry.blocks for entry in self.lists)
            for name, tree in found.forward.items():
                if isinstance(tree, dict) and BLOCKS in tree:
                    found.forward[name] = [tree[BLOCKS]] * every
                    self.says_blocks = True
            if looped := [letter for letter in found.varies if letter != "B"]:
                words = {"F": "frames", "H": "rows", "T": "text tokens"}
                fault = f"{self.source.class_name} loops over its {' and '.join(words[letter] for letter in looped)}"
                raise VplanError(
                    f"{fault}: one recording does not hold for all lengths", "it needs a family of its own"
                )
            return found
        raise _asked_for(self.source.class_name, found)

    # ---- the profile

    def profile(self, name: str, parameters: int) -> ModelProfile:
        """The complete profile, with sums that explain all sizes at two shapes."""
        main = self._main_name()
        is_sequence = not re.search(r"\b\d*H\b", self._main_dims(main))
        latents = Latents(self._latent_channels(main), self.is_video, is_sequence)
        space = latent_space(self.source, self.pipeline, self.inputs, latents, self.said)
        self.assumed += space.assumed
        profile = self._profile(name, parameters, main, space)
        for alike in (True, False) if self._can_be_shallow(profile) else (False,):
            stacks = tuple(stack if alike else stack.replace(alike=False) for stack in profile.stacks)
            try:
                return with_sums(profile.replace(stacks=stacks, traits=profile.traits))
            except NoRun:  # with few blocks, because some classes need a multiple
                if not alike:
                    raise
            except AssertionError:
                if not alike:
                    raise VplanError(
                        f"the blocks of {self.source.class_name} do not run one after the other", "it needs a family"
                    ) from None
        raise AssertionError("one of both returns or raises")

    def _can_be_shallow(self, profile: ModelProfile) -> bool:
        """Whether a model with fewer blocks can stand for the whole one. Not if an argument has an entry for each
        block, or if the config refers to blocks by number (`vace_layers`)."""
        if self.says_blocks:
            return False
        try:
            shallow = built(self.model_class, tapes.shallow_config(profile))
        except own.REFUSALS:
            return False
        whole = built(self.model_class, self.config)
        return stand_for_all(shallow, whole, [stack.list for stack in profile.stacks])

    def _main_name(self) -> str:
        names = [name for name in MAIN if name in self.answer.forward]
        if not names:
            fault = f"forward of {self.source.class_name} has no argument for noisy latents"
            raise VplanError(fault, "it needs a family of its own")
        return names[0]

    def _main_dims(self, main: str) -> str:
        tree = self.answer.forward[main]
        return f"B {tree[SAMPLES]}" if isinstance(tree, dict) else str(tree)

    def _channel_axis(self, main: str) -> int:
        words = self._main_dims(main).split()
        return max(range(len(words)), key=lambda index: int(words[index]) if words[index].isdecimal() else 0)

    def _latent_channels(self, main: str) -> int:
        return int(self._main_dims(main).split()[self._channel_axis(main)])

    def _profile(self, name: str, parameters: int, main: str, space: LatentSpace) -> ModelProfile:
        packed = len(self._main_dims(main).split()) == 3 and "HW" in self._main_dims(main)
        patch = self.patch
        if packed and not self.inputs.patch:
            patch = self._folded(self._latent_channels(main), space.channels)
            self.assumed.append(f"a token is a cell of {patch.rows}x{patch.columns} latents")
        stacks = self._stacks()
        call = self._call(main, stacks)
        targets = self._lora_targets(stacks)
        shape = self._shape(patch, space)
        flow = self.pipeline is None or self.pipeline.predicts_velocity
        self.assumed.append("the loss is the plain squared error of the " + ("velocity" if flow else "noise"))
        encoders, missing = own.encoders_of(self.source, None, [])
        self.assumed += missing
        call = {**call, "assumed": tuple(self.assumed)}
        return ModelProfile.read(
            {
                "name": name,
                "title": name,
                "family": FAMILY,
                "kind": "video" if self.is_video else "image",
                "diffusers_class": self.source.class_name,
                "parameters": parameters,
                "license": "your own model's",
                "aliases": (),
                "sources": (
                    f"config: {CONFIG} of the folder recorded",
                    "the rest: its class and pipeline in diffusers",
                ),
                "config": self.config,
                "stacks": [stack.to_json() for stack in stacks],
                "vae": space.vae,
                "text_encoders": [encoder.to_json() for encoder in encoders],
                "shape": shape,
                "lora": {"targets": targets},
                "inputs": ForwardCall.read(call).to_json(),
                "training": {
                    "objective": "flow" if flow else "epsilon",
                    "weights_dtype": "bf16",
                    "num_train_timesteps": 1000,
                    "timestep_sampling": "logit_normal" if flow else "uniform",
                    "source": f"plain, as {self.pipeline.name} samples" if self.pipeline else "plain",
                },
                "origin": self.source.origin,
            },
            where=CONFIG,
        ).replace(traits=ForwardCall.read(call).traits)

    def _folded(self, channels: int, latent_channels: int | None) -> Patch:
        """The patch of a model with packed latents: a token holds as many latents as its channels are a multiple of
        the VAE's. If the VAE is not known, 2x2 or 1x1 by the pipeline's source."""
        if latent_channels is None:
            return Patch(1, 2, 2) if self.pipeline and self.pipeline.folds else Patch(1, 1, 1)
        side = math.isqrt(channels // latent_channels)
        if side < 1 or side**2 * latent_channels != channels:
            fault = f"a token of {channels} channels is no square of latents with {latent_channels}"
            raise VplanError(fault, "write patch = [1, 2, 2] for --inputs: latent frames, rows and columns of a token")
        return Patch(1, side, side)

    def _stacks(self) -> list[Stack]:
        by_name = {entry.name: entry for entry in self.lists}
        ordered = in_running_order(self.fake.model, list(by_name), self.fake.called)
        if not ordered:
            fault = f"no list of blocks was found in {self.source.class_name}"
            raise VplanError(fault, "it needs a family of its own")
        return [_stack(by_name[name], self.config) for name in ordered]

    def _call(self, main: str, stacks: Sequence[Stack]) -> dict[str, Any]:
        axis = self._channel_axis(main)
        shape = [int(size) for size in _sizes(self._main_dims(main), self.answer.grid)]
        outputs = list(tensors_in(self.answer.output))
        is_list = isinstance(self.answer.output[0], list | tuple)
        out = [len(outputs), *outputs[0].shape] if is_list else list(outputs[0].shape)
        call: dict[str, Any] = {"forward": self.answer.forward, "main": main, "channel_axis": axis}
        call["rounded"] = {name: entry.to_json() for name, entry in self.inputs.rounded.items()}
        told = (length(text, "lengths", self.inputs.rounded) for text in self.inputs.lengths)
        call["sums"] = {
            f"S{number or ''}": {"constant": constant, "products": products}
            for number, (constant, products) in enumerate(told)
        }
        call |= self._prediction(out, shape, axis)
        for name, tree in self.answer.forward.items():
            known = "as is known of the class" if name in self.inputs.inputs else "found by dry runs"
            said = "as you said" if name in self.said.inputs else known
            text = _shapes_text([argument for _, argument in _leaf_texts(tree, name)])
            self.assumed.append(f"{name} is {text}, {said}")
        if self.answer.left_out:
            self.assumed.append(f"not given: {', '.join(self.answer.left_out)}")
        call["idle"] = tuple(_idle(self.answer.idle, stacks, self.fake.model))
        outside = [name for name in call["idle"] if f".{LAST}." not in name]
        if outside:
            self.assumed.append(f"{len(outside)} parameters get no gradient, such as {outside[0]}")
        return {**call, "traits": self._traits(stacks)}

    def _prediction(self, out: list[int], shape: list[int], axis: int) -> dict[str, Any]:
        """What of an output of shape ``out`` the loss is of, for latents of ``shape``; nothing where it is as they are.
        ``axis``: that of the channels."""
        if out == shape:
            return {}
        alike_beside = _except(out, axis) == _except(shape, axis)
        if alike_beside and out[axis] == 2 * shape[axis]:
            self.assumed.append("the second half of its output, a variance, is left out of the loss")
            return {"prediction": "half"}
        if alike_beside and out[axis] < shape[axis]:
            condition = shape[axis] - out[axis]
            self.assumed.append(f"{condition} of {shape[axis]} channels are a condition, not latents")
            return {"condition": condition}
        target = _described(out, self.answer.grid)
        self.assumed.append(f"the loss compares an output of {target} with one of its kind")
        return {"target": target}

    def _traits(self, stacks: Sequence[Stack]) -> dict[str, Any]:
        """The traits of the class, as a profile writes them."""
        traits: dict[str, Any] = {
            "part": self.pipeline.part if self.pipeline else "transformer",
            "stages": not any(stack.alike for stack in stacks),
            "fp8_base": all(stack.alike for stack in stacks),
            "checkpoints": bool(getattr(self.model_class, "_supports_gradient_checkpointing", False)),
            "last_block_apart": any(entry.last_apart and entry.blocks > HEAD + TAIL + 2 for entry in self.lists),
            "rms_norm": "torch" if any(isinstance(part, RMSNorm) for part in self.fake.model.modules()) else "none",
            "attends_by_card": self.fake.attends_by_card,
            "not_encoded": "the samples of this class",
        }
        return Traits.read(traits).to_json()

    def _lora_targets(self, stacks: Sequence[Stack]) -> tuple[str, ...]:
        """The layers that a LoRA is put on: attention's by diffusers' names, else all linear layers of the blocks."""
        if self.inputs.lora_targets:
            return self.inputs.lora_targets
        names = [
            name
            for stack in stacks
            for name, module in self.fake.model.get_submodule(stack.list).named_modules()
            if isinstance(module, Linear)
        ]
        found = tuple(target for target in ADAPTED if any(f".{name}".endswith(f".{target}") for name in names))
        if {"to_q", "to_k", "to_v"} <= set(found):
            return found
        ends = dict.fromkeys(re.sub(r"^(\d+\.)+", "", name) for name in names)
        if not ends:
            raise VplanError(
                f"the blocks of {self.source.class_name} have no linear layers to adapt",
                'name layers in --inputs: lora_targets = ["to_q", "to_v"]',
            )
        self.assumed.append("a LoRA is on every linear layer of the blocks")
        return tuple(ends)

    def _shape(self, patch: Patch, space: LatentSpace) -> dict[str, Any]:
        defaults: Mapping[str, Any] = self.pipeline.defaults if self.pipeline else {}
        multiple = space.spatial * math.lcm(patch.rows, patch.columns)
        size = self._size(defaults, space)
        step = space.temporal * patch.frames if self.is_video else 1
        frames = defaults.get("num_frames") or CLIP_FRAMES
        tokens = self.inputs.text_tokens or defaults.get("max_sequence_length")
        if tokens is None and any("T" in text for text in _all_texts(self.answer.forward)):
            self.assumed.append(f"prompts of {DEFAULT_TEXT_TOKENS} tokens, as no pipeline says (else --text-tokens)")
        others = any("E" in letters for letters in _all_texts(self.answer.forward))
        if others:
            self.assumed.append("its other tokens, as of sound or a picture, are as many as the cells of an image")
        return {
            "references": int(others),
            "patch": tuple(patch),
            "frame_step": step,
            "size_multiple": multiple,
            "text_tokens": tokens or DEFAULT_TEXT_TOKENS,
            "min_frames": 1,
            "max_frames": max(frames, 257) if self.is_video else 1,
            "resolutions": (tuple(max(1, round(side / multiple)) * multiple for side in size),),
            "default_frames": (frames - 1) // step * step + 1 if self.is_video else 1,
            "only_listed": self._is_square(),
            "batches": (1, 2) if "B" in self.answer.varies else (),
        }

    def _is_square(self) -> bool:
        """Whether the class takes square images only, which shows by both sides being described in rows."""
        words = self._main_dims(self._main_name()).split()
        return len(words) == 4 and words[-1] == words[-2] and words[-1].endswith("H")

    def _size(self, defaults: Mapping[str, Any], space: LatentSpace) -> tuple[int, int]:
        height, width = defaults.get("height"), defaults.get("width")
        if isinstance(height, int) and isinstance(width, int):
            return height, width
        side = self.pipeline.constants.get("default_sample_size") if self.pipeline else None
        side = side or self.config.get("sample_size")
        if isinstance(side, int):
            if self._main_dims(self._main_name()).endswith("HW"):  # sound: a square with as many cells
                side = math.isqrt(side)
            return side * space.spatial, side * space.spatial
        return CLIP_SIZE if self.is_video else IMAGE_SIZE


def _asked_for(class_name: str, missing: Sequence[MissingArgument]) -> VplanError:
    """A VplanError that names the missing arguments, with an example file as its fix."""
    first = missing[0]
    lines = "; ".join(f"inputs.{entry.name} = {_toml(entry.example)}" for entry in missing)
    why = "; ".join(f"{entry.name}: {entry.why}" for entry in missing)
    fault = f"{class_name} is called with something that its class does not tell: {why}"
    return VplanError(fault, f"write a file for --inputs, such as: {lines}" if first.example else "it needs a family")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"'


def _stack(entry: BlockList, config: Config) -> Stack:
    alike = isinstance(config.get(entry.depth_key), int)
    return Stack(
        list=entry.name, depth_key=entry.depth_key, alike=alike, blocks=None if entry.depth_key else entry.blocks
    )


def _sizes(text: str, grid: Mapping[str, int]) -> Iterator[int]:
    yield from parse_argument(text, "latents").shape(grid)


def _except(sizes: Sequence[int], axis: int) -> list[int]:
    return [size for index, size in enumerate(sizes) if index != axis]


def _described(sizes: Sequence[int], grid: Mapping[str, int]) -> str:
    """The sizes of an output as dimensions: each as a product of atoms and a number."""
    words: list[str] = []
    for size in sizes:
        letters, rest = "", size
        for letter in ("B",) if not words else ("F", "H", "W", "T"):
            if grid[letter] > 1 and rest % grid[letter] == 0:
                letters, rest = letters + letter, rest // grid[letter]
        words.append(f"{rest if rest > 1 or not letters else ''}{letters}")
    return " ".join(words)


def _leaf_texts(tree: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for key, inner in tree.items():
            yield from _leaf_texts(inner, f"{name}.{key}")
    elif isinstance(tree, list):
        for inner in tree:
            yield from _leaf_texts(inner, name)
    else:
        yield name, tree


MOST_SHAPES = 4
"""Above this number, equal shapes are given as a count."""


def _shapes_text(texts: Sequence[str]) -> str:
    """The shapes of an argument's tensors, in words."""
    if len(texts) > MOST_SHAPES and len(set(texts)) == 1:
        return f"{len(texts)} times [{texts[0]}]"
    return ", ".join(f"[{text}]" for text in texts)


def _all_texts(forward: Mapping[str, Any]) -> Iterator[str]:
    for name, tree in forward.items():
        for _, argument, _ in leaves(tree, name):
            yield argument.letters


def _idle(names: set[str], stacks: Sequence[Stack], model: nn.Module) -> Iterator[str]:
    """The names of parameters without gradient, with block numbers replaced by `ANY` if the parameter is idle in all
    blocks, or by `LAST` if only in the last one. Lists that are never called are not stacks, but they get deeper with
    the model too, so they count for `ANY`."""
    stacked = {stack.list for stack in stacks}
    lists = {name: len(list(model.get_submodule(name).children())) for name in (*stacked, *list_names(model))}
    for name in sorted(names):
        module_list = next((known for known in lists if name.startswith(f"{known}.")), None)
        if module_list is None:
            yield name
            continue
        number, _, rest = name.removeprefix(f"{module_list}.").partition(".")
        count = lists[module_list]
        if all(f"{module_list}.{index}.{rest}" in names for index in range(count)):
            if number == "0":
                yield f"{module_list}.{ANY}.{rest}"
        elif module_list in stacked and int(number) == count - 1:
            yield f"{module_list}.{LAST}.{rest}"
        else:
            yield name
