"""What is known, as data: models, cards, tapes and measurements. This is where it lies; `planner.catalog.lookup` and
`planner.catalog.card_lookup` read it."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
GPUS = FOLDER / "gpus.toml"
APPLE = FOLDER / "apple.toml"
OTHER_CARDS = FOLDER / "other_cards.toml"
MODELS = FOLDER / "models"
OTHER_MODELS = FOLDER / "other_models.toml"
OTHER_SCRIPTS = FOLDER / "other_scripts.toml"
"""Models that people name and that none of `MODELS` describes."""

MODEL_LISTS = FOLDER / "model_lists"
"""The models that trainers list in their documentation."""

CLASSES = FOLDER / "classes"
"""What `vplan record` is told of classes whose arguments no dry run finds out."""
TAPES = FOLDER / "tapes"
MEASUREMENTS = FOLDER / "measurements"
REHEARSALS = FOLDER / "rehearsals"
TRAINERS = FOLDER / "trainers"
FLAG_EFFECTS = FOLDER / "flag_effects"
"""What trainers' settings do to memory that vplan does not translate."""

GRIDS = FOLDER / "grids"
COMFYUI = FOLDER / "comfyui.toml"
"""Names of layers in ComfyUI's models."""

BLOCK_SWAP = FOLDER / "block_swap.toml"
"""How trainers count the blocks they swap."""


def model_path(name: str) -> Path:
    """Where the model of that name is described, whether or not there is one."""
    return MODELS / f"{name}.toml"


def model_names() -> tuple[str, ...]:
    """Names of the bundled models, which are their files' names, in alphabetical order."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in MODELS.glob("*.toml")))


def trainer_path(name: str) -> Path:
    """Where the flags of the trainer of that name are, whether or not there is one."""
    return TRAINERS / f"{name}.toml"


def flag_effects_path(name: str) -> Path:
    """Where it is said what the settings of the trainer of that name do to memory, whether or not it is."""
    return FLAG_EFFECTS / f"{name}.toml"


def trainer_names() -> tuple[str, ...]:
    """Names of the trainers and launchers whose flags are known, in alphabetical order."""
    return tuple(sorted(path.name.removesuffix(".toml") for path in TRAINERS.glob("*.toml")))


def grid(name: str) -> Path | None:
    """Where the bundled grid of that name is; None: there is none."""
    return next((path for path in GRIDS.glob("*.toml") if path.stem == name), None)
