"""What sd-scripts' scripts have alike, read at 48d368f: datasets, sizes, optimizers, caches and samples
(library/train_util.py, library/config_util.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.dialects.base import flags
from planner.dialects.base.bindings import Fields, FunctionPair, InexpressibleError, Remark, Settings, UnsupportedValue
from planner.dialects.base.commands import parse_program
from planner.dialects.base.common_bindings import one_of, word_for
from planner.dialects.base.dialect import Invocation
from planner.dialects.base.launchers import launch_settings
from planner.dialects.base.script import PythonCommand, Script
from planner.dialects.base.values import integer
from planner.dialects.kohya import dataset_tables
from planner.dialects.kohya.dataset_tables import DATASET
from planner.dialects.sd_scripts.engine import SAVES_SHARES
from planner.errors import VplanError
from planner.spec.job import Bucket
from planner.untrusted import flat


def read_command(program: PythonCommand, script: Script) -> Invocation:
    """A command of one of its scripts, with what its config (--config_file) and its dataset's file say."""
    launch, notes = launch_settings(program, script, {})
    invocation = parse_program("sd-scripts", program, launch, [*script.notes, *notes])
    settings, unknown = invocation.settings, invocation.unknown
    if path := settings.get("--config_file"):
        name = path if str(path).endswith(".toml") else f"{path}.toml"
        inside = script.document(str(name))
        if inside is None:
            raise VplanError(script.missing(str(name)), "run vplan where the command would run, or supply the file")
        parsed = flags.script("sd-scripts", program.script).parse_config(inside)
        settings, unknown = parsed.values | settings, (*unknown, *parsed.unknown)
    return with_dataset(replace(invocation, settings=settings, unknown=unknown), script)


def read_config(kind: str, script: Script) -> Invocation:
    """A config (--config_file) alone, of the script ``kind``."""
    parsed = flags.script("sd-scripts", kind).parse_config(script.config or {})
    removed = tuple(Remark(name, why) for name, why in parsed.removed.items())
    invocation = Invocation("sd-scripts", {"script": kind, **parsed.values}, parsed.unknown, removed, script.notes)
    return with_dataset(invocation, script)


def names(config: dict[str, Any]) -> set[str]:
    """The keys of a config, in whatever table they stand."""
    return {name.rpartition(".")[2] for name in flat(config, "config")}


def with_dataset(invocation: Invocation, script: Script) -> Invocation:
    """Beside them what the dataset's file says, where it is here."""
    path = invocation.settings.get("--dataset_config")
    if not path:
        return invocation
    document = script.document(str(path))
    if document is None:
        note = f"{script.missing(str(path))}: estimated at the model's default size, one sample per step"
        return replace(invocation, notes=(*invocation.notes, note))
    inside = {f"{DATASET}{name}": value for name, value in flat(document, str(path)).items()}
    return replace(invocation, settings=invocation.settings | inside)


def inside(settings: Settings, key: str) -> list[Any]:
    """Everything a dataset's file says of a key, in whatever table."""
    return [value for name, value in settings.items() if name.startswith(DATASET) and name.rpartition(".")[2] == key]


def sides(value: Any) -> tuple[int, int]:
    """Height and width of `1024`, `"1024,768"` or `[1024, 768]`, which are width and height."""
    parts = value if isinstance(value, list) else str(value).split(",")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise VplanError(f"resolution {value!r} is not a size", "write 1024, or width,height") from None
    return numbers[-1], numbers[0]


FLAGS = {"resolution": "--resolution", "batch_size": "--train_batch_size"}
"""Keys of a dataset that a flag says where the file does not."""


def shapes(settings: Settings, table: str, step: int = 1) -> tuple[Bucket, ...]:
    """The shape of a dataset, by what its settings begin with: images of one size in batches of its own, which its
    subsets have no keys for (library/config_util.py ``DATASET_ASCENDABLE_SCHEMA``). None where no size is said.
    ``step``: pixels that sides are whole steps of."""
    said = dataset_tables.value(settings, table, "resolution", FLAGS)
    if not said:
        return ()
    height, width = (side // step * step for side in sides(said))
    batch = integer(dataset_tables.value(settings, table, "batch_size", FLAGS) or 1, "batch_size")
    shape = {"frames": 1, "height": height, "width": width, "batch_size": batch}
    return (Bucket.read(shape, "the dataset"),)


def size(settings: Settings, step: int = 1) -> Fields:
    """The shapes of all datasets, each of which has its own size and batch; where none says a size, the model's."""
    tables = dataset_tables.tables(settings)
    found = [shape for table in tables for shape in shapes(settings, table, step)]
    if found:
        fields = dataset_tables.fields_of(found)
        return {name: fields[name] for name in SHAPE}
    batches = [dataset_tables.value(settings, table, "batch_size", FLAGS) or 1 for table in tables]
    batch = max(integer(each, "batch_size") for each in batches)
    return {"height": None, "width": None, "batch_size": batch, "buckets": ()}


SHAPE = ("height", "width", "batch_size", "buckets")


def changed_size(settings: Settings, before: Fields, after: Fields, step: int = 1) -> Settings | None:
    """What of the file or the flags says other sizes and batches of several datasets (`dataset_tables.changed`)."""
    return dataset_tables.changed(settings, before, after, lambda table: shapes(settings, table, step), FLAGS)


def shared_notes(fields: Fields) -> Iterator[str]:
    """What goes for every script: of datasets of several shapes the answer is of the one that needs most, and stage 3
    of ZeRO does not save what it trained."""
    if fields["sharding"] == "zero-3":
        yield f"ZeRO-3: {SAVES_SHARES}"
    if fields["buckets"]:
        batch = fields["batch_size"]
        each = [f"{one.height}x{one.width} at batch {one.batch_size or batch}" for one in fields["buckets"]]
        yield f"datasets of {', '.join(each)}: the one that needs most is priced"


def resident_notes(fields: Fields, encoders: str) -> Iterator[str]:
    """Says what stays on the GPU because it is not cached. ``encoders``: the script's text encoders, in words."""
    parts = ((encoders, "text_encoder"), ("the VAE", "vae"))
    resident = [name for name, field in parts if fields[field] == "resident"]
    if resident:
        names = " and ".join(resident)
        yield f"{names} {'stay' if ' and ' in names else 'stays'} on the GPU: not cached"


def highvram_remarks(settings: Settings, like: str = "") -> Iterator[Remark]:
    """``--highvram`` changes nothing of a training step. ``like``: what it changes as little with, in words."""
    if settings.get("--highvram"):
        why = f"it only keeps the cache while latents are cached: training needs the same{like}"
        yield Remark("--highvram", why)


def write_model(fields: Fields, files: Mapping[str, str], why: str) -> Settings:
    """The flag that names the file of a plan's model. ``files``: of the models that a script trains, the first in place
    of any other. Raises an InexpressibleError with ``why`` for another."""
    model = fields["model"]
    if model not in files:
        raise InexpressibleError(UnsupportedValue("model", model, next(iter(files)), why))
    return {"--pretrained_model_name_or_path": files[model]}


def write_size(fields: Fields) -> Settings:
    """The dataset's keys that say size and batch. Raises an InexpressibleError for several shapes: one is written."""
    if fields["buckets"]:
        why = "one dataset is written, which has one size and one batch"
        raise InexpressibleError(UnsupportedValue("buckets", fields["buckets"], (), why))
    return {
        f"{DATASET}general.resolution": [fields["width"], fields["height"]],
        f"{DATASET}datasets[0].batch_size": fields["batch_size"],
    }


OPTIMIZERS = {
    "AdamW": "adamw",
    "AdamW8bit": "adamw-8bit",
    "PagedAdamW8bit": "adamw-8bit-paged",
    "Lion": "lion",
    "Adafactor": "adafactor",
    "Prodigy": "prodigy",
}


def optimizer(settings: Settings) -> Fields:
    """The optimizer, AdamW where none is named (library/train_util.py ``get_optimizer``)."""
    if settings.get("--use_8bit_adam"):
        return {"optimizer": "adamw-8bit"}
    if settings.get("--use_lion_optimizer"):
        return {"optimizer": "lion"}
    return {"optimizer": one_of(OPTIMIZERS, "--optimizer_type")(settings.get("--optimizer_type") or "AdamW")}


def write_optimizer(fields: Fields) -> Settings:
    """The flag that says the optimizer. Raises an InexpressibleError for one that it has not."""
    word = word_for(OPTIMIZERS, "optimizer", "adamw")(fields["optimizer"])
    return {"--optimizer_type": word} if word != "AdamW" else {}


def cached(field: str, flag: str) -> FunctionPair:
    """Cached by a flag, in memory or on disk; else on the GPU."""

    def to_fields(settings: Settings) -> Fields:
        on = settings.get(flag) or settings.get(f"{flag}_to_disk")
        return {field: "cached" if on else "resident"}

    def to_settings(fields: Fields) -> Settings:
        if fields[field] == "swapped":
            raise InexpressibleError(UnsupportedValue(field, "swapped", "cached", "it is cached, or stays on the GPU"))
        return {flag: True} if fields[field] == "cached" else {}

    return FunctionPair((field,), (flag, f"{flag}_to_disk"), to_fields, to_settings, {field: "resident, cached"})


def refuse_images_at_once(settings: Settings) -> None:
    """Raises a VplanError where latents are cached from several images at once: one is priced (library/train_util.py
    ``new_cache_latents``)."""
    cached_before = settings.get("--cache_latents") or settings.get("--cache_latents_to_disk")
    if cached_before and int(settings.get("--vae_batch_size") or 1) > 1:
        fault = "--vae_batch_size is not priced with --cache_latents (each image that is encoded at once takes as much)"
        raise VplanError(fault, "leave --vae_batch_size out")


SAMPLES = ("--sample_every_n_steps", "--sample_every_n_epochs", "--sample_at_first")


def validation(settings: Settings) -> Fields:
    """Whether samples are made: prompts are given, and when."""
    on = settings.get("--sample_prompts") and any(settings.get(name) for name in SAMPLES)
    return {"validation_mode": "on" if on else "off"}


def write_validation(fields: Fields) -> Settings:
    """The flags that ask for samples. Raises an InexpressibleError for a model that would make room for them."""
    if fields["validation_mode"] == "offload":
        raise InexpressibleError(
            UnsupportedValue("validation_mode", "offload", "on", "it samples with the model where it is")
        )
    on = {"--sample_prompts": "prompts.txt", "--sample_every_n_steps": 500}
    return on if fields["validation_mode"] == "on" else {}
