"""The pages of the docs that are made from what we know: `docs/models.md`, `docs/gpus.md` and `docs/trainers.md`.

`vplan models --markdown`, `gpus` and `export` print them; a test holds the committed pages to that. They speak
of what comes with vplan only, never of a user's own models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import profiles
from planner.catalog import apple_cards, card_lookup, lookup
from planner.catalog.card_profiles import GpuProfile
from planner.catalog.names.other_models import find as find_other
from planner.catalog.names.other_models import other_names
from planner.catalog.names.trainer_lists import ListedModel, NameVerdict, TrainerList, name_verdict, trainer_lists
from planner.catalog.profiles import ModelProfile
from planner.dialects.base.dialect import capabilities
from planner.launch.training_settings import preset_words
from planner.spec.job import Strategy
from planner.units import MIB, gib


def models_page() -> str:
    """The Markdown of docs/models.md: all bundled models with their sources."""
    models = [lookup.model(name) for name in profiles.model_names()]
    lines = [
        "# Models",
        "",
        f"Reference tables of the {len(models)} models that vplan knows by name, with the source of each fact. Made",
        "from `profiles/models/` by `vplan models --markdown`.",
        "",
        "To find a model, search this page for its name or its repository at the hub: other names stand under",
        "[sources](#sources). `vplan models NAME` prints one model alone and takes any of these names. If yours is",
        "not here, see [listed and refused](#listed-and-refused), or record it yourself",
        "([your-own-model.md](your-own-model.md)).",
        "",
        "| you want to know | look under |",
        "|---|---|",
        "| sizes, clip lengths, license, what `vplan train` takes | the next table |",
        "| LoRA layers, text encoders, VAE | [what trains it](#what-trains-it-and-what-stands-beside-it) |",
        "| noise levels and loss | [how it is trained](#how-it-is-trained) |",
        "| which trainers have it | [who lists what](#who-lists-what) |",
        "| where a fact comes from | [sources](#sources) |",
        "",
        "*Parameters* are those of the part that is trained (the transformer or UNet), counted. *Frames* are the usual",
        "length, the longest trained on, and the rule for others: 4n+1 takes 1, 5, 9 and so on. Sizes are height x",
        "width, the usual one first. *Data* is what `vplan train` takes: a folder of files, or only samples that are",
        "encoded already, with what it cannot encode yet. A model of your own is added with `vplan record FOLDER`.",
        "",
        *_table(
            ("model", ">parameters", "class", "frames", "data", "sizes", "license"),
            [_model_row(model) for model in models],
        ),
        "",
        "## What trains it, and what stands beside it",
        "",
        "*LoRA layers* are the default targets; a second choice is recorded too where there is one. The VAE's numbers",
        "are how much it shrinks time and sides, and its latent channels.",
        "",
        *_table(
            ("model", "LoRA layers", "text encoders", "VAE"),
            [_parts_row(model) for model in models],
        ),
        "",
        "## How it is trained",
        "",
        "The presets of `vplan train`, whose options replace any part of them ([training.md](training.md)). A model's",
        "source is named below.",
        "",
        *_table(("model", "preset"), [[f"`{model.name}`", preset_words(model)] for model in models]),
        "",
        *_who_lists_what(models),
        "",
        "## Sources",
        "",
    ]
    for model in models:
        lines += [f"**{model.title}** (`{model.name}`), also " + _names(model.aliases), ""]
        lines += [f"- {_text(source)}" for source in (*model.sources, f"training law: {model.training.source}")]
        lines += [""]
    return "\n".join(lines)


def _model_row(model: ModelProfile) -> list[str]:
    shape = model.shape
    frames = "1 (image)"
    if model.kind == "video":
        frames = f"{shape.default_frames}, to {shape.max_frames}, {shape.frame_rule}"
    experts = " x 2" if model.experts == 2 else ""
    sizes = ", ".join(f"{height}x{width}" for height, width in shape.resolutions)
    parameters = f"{model.parameters:,}{experts}"
    data = f"encoded: {model.traits.not_encoded}" if model.traits.not_encoded else "files"
    return [f"`{model.name}`", parameters, f"`{model.diffusers_class}`", frames, data, sizes, model.license]


def _parts_row(model: ModelProfile) -> list[str]:
    encoders = ", ".join(
        f"{encoder.name} ({encoder.parameters / 1e9:.2f} B, {encoder.max_tokens} tokens, {encoder.dtype})"
        for encoder in model.text_encoders
    )
    vae = model.vae
    size = f"{vae.parameters / 1e6:.0f} M, {vae.dtype}"
    layers = _names(model.lora.targets)
    if model.lora.wide:
        layers += "; or " + _names(model.lora.wide)
    shrinks = f"{vae.temporal}x{vae.spatial}x{vae.spatial} to {vae.latent_channels} channels"
    return [f"`{model.name}`", layers, encoders or "none", f"`{vae.class_name}` ({size}): {shrinks}"]


def _who_lists_what(models: Sequence[ModelProfile]) -> list[str]:
    """The section on what other trainers list, by what lookup answers to their names now."""
    lists = trainer_lists()
    rows = [_counts_row(each) for each in lists]
    totals = [sum(row[column] for row in rows) for column in range(len(NameVerdict) + 1)]
    count, numbers, several, refused, unknown = totals
    of_both = [(each, listed, *name_verdict(listed.name)) for each in lists for listed in each.models]
    return [
        "## Who lists what",
        "",
        f"The models that {len(lists)} trainers list in their documentation (`profiles/model_lists/`), and what vplan",
        f"answers where one is asked for by the trainer's own name. Of {count} names {count - unknown} are known and",
        f"{unknown} are not: {numbers} get numbers, {several} mean several models of ours, of which",
        f"`vplan suggest NAME --gpu CARD` gives a table, and {refused} are refused by name, with what is missing. The",
        "refusals were written from these lists. A name counts once for each trainer that lists it.",
        "",
        *_table(
            ("trainer", "read", ">names", ">numbers", ">several", ">refused", ">not known", ">known"),
            [[each.title, _read_of(each), *map(str, row), _share(row)] for each, row in zip(lists, rows, strict=True)]
            + [["all", "", *map(str, totals), _share(totals)]],
        ),
        "",
        "`+`: the trainer lists it under a name that is taken for this model; `~`: under one that means several of",
        "ours.",
        "",
        *_table(("model", *(each.title for each in lists)), _listed_rows(models, of_both)),
        "",
        "### Listed and refused",
        "",
        "An adapter or ControlNet stands for all of its kind that are listed. A class in the last column can be",
        "recorded from the folder of the weights with `vplan record FOLDER` ([your-own-model.md](your-own-model.md)).",
        "",
        *_table(("model", "listed by", "what is missing", "recorded as"), _refused_rows(models, of_both)),
    ]


_Listing = tuple[TrainerList, ListedModel, NameVerdict, tuple[str, ...]]
"""A trainer's list, a model on it, what its name gets, and our models that it means."""


def _counts_row(each: TrainerList) -> list[int]:
    """How many names a trainer lists, and how many of them get each kind of answer."""
    answers = [name_verdict(listed.name)[0] for listed in each.models]
    return [len(answers), *(answers.count(kind) for kind in NameVerdict)]


def _share(counts: Sequence[int]) -> str:
    """The share of names that are known, of the names and the counts of each answer."""
    return f"{(counts[0] - counts[-1]) / counts[0]:.0%}"


def _read_of(each: TrainerList) -> str:
    return f"{each.file} at {each.commit}: {each.section}"


def _listed_rows(models: Sequence[ModelProfile], listings: Sequence[_Listing]) -> Iterator[list[str]]:
    """A row for each bundled model with a mark for each trainer."""
    titles = list(dict.fromkeys(each.title for each, *_ in listings))
    marks: dict[tuple[str, str], str] = {}
    for each, _, kind, names in listings:
        for name in names if kind in (NameVerdict.NUMBERS, NameVerdict.SEVERAL) else ():
            if marks.get((name, each.title)) != "+":
                marks[name, each.title] = "+" if kind is NameVerdict.NUMBERS else "~"
    for model in models:
        yield [f"`{model.name}`", *(marks.get((model.name, title), "") for title in titles)]


def _refused_rows(models: Sequence[ModelProfile], listings: Sequence[_Listing]) -> Iterator[list[str]]:
    """A row for each model that is listed and has no profile, and for each of the distilled ones."""
    refused = [(each, listed, names) for each, listed, kind, names in listings if kind is NameVerdict.REFUSED]
    for model in models:
        if by := dict.fromkeys(each.title for each, _, names in refused if model.name in names):
            yield [f"{model.title}, distilled", ", ".join(by), f"it is not trained; its memory is `{model.name}`'s", ""]
    for other in other_names().model:
        if by := dict.fromkeys(each.title for each, listed, _ in refused if find_other(listed.name) is other):
            beside = f" (beside `{other.goes_with}`)" if other.goes_with else ""
            yield [other.title, ", ".join(by), other.missing + beside, other.recorded_by and f"`{other.recorded_by}`"]


def trainers_page() -> str:
    """The Markdown of docs/trainers.md: what each trainer can express, from the tables that read and write its
    commands."""
    from planner import dialects

    all_dialects = [dialect for name, dialect in dialects.all_dialects().items() if "@" not in name]
    written = [dialect for dialect in dialects.all_dialects().values() if dialect.files and dialect not in all_dialects]
    words = {dialect.name: capabilities(dialect) for dialect in (*all_dialects, *written)}
    lines = [
        "# Trainers",
        "",
        f"Reference tables of the {len(all_dialects)} trainers whose commands and files vplan reads or writes:",
        "which fields of a plan each can express, and by which setting. How to check and export a command is in",
        "[other-trainers.md](other-trainers.md). Made from `planner/dialects/` by `vplan export --markdown`.",
        "",
        "The first table says what is read (`vplan check`) and written (`vplan export`), the second which fields each",
        "trainer has. Under a trainer's heading a table goes from the field of a plan to the trainer's flag or key.",
        "Flags and keys were read in the sources at the commit named (`profiles/trainers/`); a test holds what is",
        "written to them.",
        "",
        *_table(
            ("trainer", "name", "read", "written", "source"),
            [
                [each.title, f"`{each.name}`", _yes(each.read_script), _yes(each.files), _text(each.source)]
                for each in all_dialects
            ],
        ),
        "",
        "## Strategy fields that each can express",
        "",
        "`+`: the trainer has a setting for it; `=`: always the same there; empty: its script decides.",
        "",
        *_table(
            ("field", *(f"{dialect.name}" for dialect in all_dialects)),
            [
                [f"`{name}`", *(_mark(words[each.name].get(name)) for each in all_dialects)]
                for name in Strategy.model_fields
            ],
        ),
    ]
    for dialect in sorted((*all_dialects, *written), key=lambda dialect: dialect.title.lower()):
        notes = {name: text for name, text in words[dialect.name].items() if not text.startswith("always")}
        always = {name: text for name, text in words[dialect.name].items() if text.startswith("always")}
        lines += ["", f"## {dialect.title}", ""]
        lines += _table(("field", "how"), [[f"`{name}`", _text(text)] for name, text in notes.items()])
        if always:
            fixed = ", ".join(f"`{name}` {_text(text.removeprefix('always '))}" for name, text in always.items())
            lines += ["", f"Always: {fixed}."]
    return "\n".join([*lines, ""])


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _mark(words: str | None) -> str:
    return "" if words is None else "=" if words.startswith("always") else "+"


def gpus_page() -> str:
    """The Markdown of docs/gpus.md: all cards and classes of cards with their sources."""
    cards = [card_lookup.gpu(name) for name in card_lookup.gpu_names()]
    cards.sort(key=lambda card: (card.class_gb, card.allocatable_gib, card.name))
    classes = [
        [group.name, _names(group.reference), _names(group.smaller) if group.smaller else "none"]
        for group in card_lookup.gpu_classes()
    ]
    lines = [
        "# Cards",
        "",
        f"The {len(cards)} cards that vplan knows by name. Made from `profiles/gpus.toml` by `vplan gpus --markdown`.",
        "",
        "*Gives* is what a process can be given (torch's `total_memory`), which is the budget of a plan; *total* is",
        "what `nvidia-smi` shows; *context* is what one process takes beside its tensors. Rates are dense, never",
        "sparse: bf16 and fp16 with fp32 accumulation. The link is to host RAM, one direction, as measured. *W* is the",
        "power limit as shipped: NVIDIA's total power of the card, on AWS what `nvidia-smi` shows (A10G), with the CPU",
        "where it is one module (GH200, GB10), and the most that a laptop's maker may set. But for A10G, A6000, V100",
        "and A100 PCIe, these limits have not been checked a second time. Of AMD's Instinct, *total* is what",
        "`rocm-smi` shows, and no run on one was compared with an estimate: their ranges are 5 % wider both ways. For",
        "any other card name the memory itself, as `--gpu 23.5GiB`.",
        "",
        *_table(
            (
                "class",
                "card",
                "chip",
                ">gives GiB",
                ">total GiB",
                ">context MiB",
                ">bf16 TFLOPS",
                ">fp16",
                ">fp8",
                ">fp32",
                ">GB/s",
                "link",
                ">NVLink GB/s",
                ">W",
            ),
            [_card_row(card) for card in cards],
        ),
        "",
        "## Classes",
        "",
        "`--gpu 24GB` is the card of its class that gives least. *Sold alike* are cards under the same label that give",
        "less: an answer says so where the verdict differs for one of them.",
        "",
        *_table(("class", "stands for it", "sold alike"), classes),
        "",
        *_mac_lines(),
        "## Sources",
        "",
        *(f"- **{card.title}** (`{card.name}`): {_text(card.source)}" for card in cards),
        "",
    ]
    return "\n".join(lines)


def _mac_lines() -> list[str]:
    """The section about Macs: chips, and what Metal lets a process have of each size of memory."""
    macs = apple_cards.apple_file()
    return [
        "## Macs",
        "",
        'A chip of Apple with its memory is a card: `--gpu m4max-64gb`, `--gpu "M4 Max 64GB"`. It gives what Metal',
        "recommends (`recommendedMaxWorkingSetSize`); [apple.md](apple.md) says what becomes of plans that take more.",
        "",
        *_table(
            ("chip", "name", ">GPU cores", ">GB/s", "memory, GB"),
            [
                [
                    f"Apple {chip.title}",
                    f"`{chip.name}-...gb`",
                    f"{chip.cores}",
                    f"{chip.bandwidth_gbs:g}",
                    _amounts(chip),
                ]
                for chip in macs.chip
            ],
        ),
        "",
        *_table(
            (">memory, GB", ">gives GiB", "source"),
            [[f"{each.memory_gb}", f"{each.gib:.2f}", _text(each.source)] for each in macs.working_set],
        ),
        "",
    ]


def _amounts(chip: apple_cards.Chip) -> str:
    return ", ".join(map(str, chip.memory_gb))


def _card_row(card: GpuProfile) -> list[str]:
    rates = (card.bf16_tflops, card.fp16_tflops, card.fp8_tflops, card.fp32_tflops)
    return [
        f"{card.class_gb}GB",
        f"`{card.name}`",
        f"{card.architecture} {card.compute_capability}",
        f"{card.allocatable_gib:.2f}",
        f"{gib(card.nvml_total_mib * MIB):.2f}",
        f"{card.context_mib:.0f}",
        *(f"{rate:g}" if rate else "-" for rate in rates),
        f"{card.bandwidth_gbs:g}",
        "one memory with the CPU" if card.unified else f"{card.link}, {card.link_gbs:g} GB/s",
        f"{card.nvlink_gbs:g}" if card.nvlink_gbs else "-",
        f"{card.power_watts:g}",
    ]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A Markdown table; a column whose name starts with `>` is right-aligned."""
    yield "| " + " | ".join(column.removeprefix(">") for column in columns) + " |"
    yield "|" + "|".join("---:" if column.startswith(">") else "---" for column in columns) + "|"
    for row in rows:
        yield "| " + " | ".join(map(_text, row)) + " |"


def _text(value: str) -> str:
    """A text as it may stand in a cell or a list, on one line."""
    return " ".join(value.replace("|", "\\|").split())


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
