"""The sets of SimpleTuner's `data_backend_config`: batches, what conditions and encodes, both ways, read at bc8e6ab.
Their sizes are in `planner.dialects.simpletuner.aspect_buckets`."""

from __future__ import annotations

from typing import Any

from planner.catalog import lookup
from planner.dialects.base.bindings import Fields, InexpressibleError, Settings, UnsupportedValue
from planner.dialects.base.script import Script
from planner.dialects.base.values import as_list, integer
from planner.dialects.simpletuner import example_paths
from planner.dialects.simpletuner.aspect_buckets import DATASET, NOT_FOUND, SAMPLES
from planner.dialects.simpletuner.defaults import is_true
from planner.dialects.simpletuner.models import CONFIG, family_of, model_of, of
from planner.errors import VplanError, quoted
from planner.untrusted import parse, read_text

BATCH = "data:batch"
"""The largest ``train_batch_size`` of a set of its own, where one says so."""

REFERENCES = "data:references"
"""How many sets condition a sample, of which one is taken, or all with ``conditioning_multidataset_sampling``."""

UNCACHED = {"vae": "data:vae", "text_encoder": "data:text_encoder"}
"""Whether a set encodes while it trains."""

TRAINED_KINDS = ("image", "video")
"""Values of ``dataset_type`` whose sizes are trained; others are caches and what conditions."""

MASKS = ("mask", "segmentation", "grounding")
"""Values of ``conditioning_type`` that weigh the loss, or act with a setting that is not priced."""


def samples(script: Script, settings: Settings) -> Settings:
    """The sets of the data file that the config names, where the file is here."""
    path = of(settings, "data_backend_config")
    if not isinstance(path, str):
        return {}
    file = example_paths.find(script, path)
    if file is None:
        return {NOT_FOUND: script.missing(path)}
    sets = parse(read_text(file), "json", file.name)
    if not isinstance(sets, list) or not all(isinstance(entry, dict) for entry in sets):
        raise VplanError(f"{quoted(file.name)} is no list of data sets", "name SimpleTuner's multidatabackend file")
    sets = [entry for entry in sets if entry.get("disabled") is not True]
    found: Settings = {}
    for part, words in ENCODES.items():
        if any(is_true(entry.get(word)) for entry in sets for word in words):
            found[UNCACHED[part]] = True
    trained = [entry for entry in sets if str(entry.get("dataset_type", "image")) in TRAINED_KINDS]
    if sizes := [entry["train_batch_size"] for entry in trained if entry.get("train_batch_size")]:
        usual = of(settings, "train_batch_size")
        sizes += [usual] if len(sizes) < len(trained) else []
        found[BATCH] = max(integer(size, "train_batch_size") for size in sizes)
    if count := _conditioning(sets, trained):
        found[REFERENCES] = count
    rows = []
    for entry in trained:
        frames = _clip_length(entry, settings)
        cropped = entry.get("crop") is True and entry.get("crop_aspect") in ("closest", "random")
        aspects = entry.get("crop_aspect_buckets") if cropped else None
        rows.append([entry.get("resolution"), entry.get("resolution_type"), frames, aspects])
    return {**found, SAMPLES: rows} if rows else found


CLIP_SECONDS = 5
FRAME_RATES = {"wan": 15, "sanavideo": 16, "kandinsky5_video": 24, "ltxvideo": 25, "ltxvideo2": 25}
"""``model_family`` -> ``framerate`` that a config leaves out (helpers/models/*/model.py ``check_user_config``)."""

USUAL_RATE = 30


def _clip_length(entry: dict[str, Any], settings: Settings) -> int:
    """Frames of a set's clips, five seconds of them where it does not say (helpers/data_backend/factory.py,
    ``num_frames``); 1 of images."""
    if entry.get("dataset_type") != "video":
        return 1
    video = entry.get("video")
    frames = video.get("num_frames") if isinstance(video, dict) else None
    if frames is None:
        rate = of(settings, "framerate") or FRAME_RATES.get(family_of(settings), USUAL_RATE)
        frames = CLIP_SECONDS * integer(rate, "framerate")
    return integer(frames, "num_frames")


def _conditioning(sets: list[Any], trained: list[Any]) -> int:
    """How many sets condition the samples of a set, at most: named, or made of its own images."""
    kinds = {str(entry.get("id")): str(entry.get("conditioning_type", "")) for entry in sets}
    counts = [0]
    for entry in trained:
        named = [name for name in as_list(entry.get("conditioning_data") or []) if kinds.get(str(name)) not in MASKS]
        made = [each for each in as_list(entry.get("conditioning") or []) if isinstance(each, dict)]
        counts.append(len(named) + sum(str(each.get("conditioning_type", "")) not in MASKS for each in made))
    return max(counts)


ENCODES = {
    "vae": ("vae_cache_ondemand", "vae_cache_disable"),
    "text_encoder": ("text_cache_ondemand", "text_cache_disable"),
}
"""Settings of the config, and of sets, with which a part encodes while it trains, and stays on the GPU for it
(helpers/training/trainer.py ``init_unload_vae``, helpers/data_backend/factory.py)."""


def encoders_of(settings: Settings) -> Fields:
    """The fields `text_encoder` and `vae`: what encodes while it trains stays on the GPU."""

    def stays(part: str, *more: str) -> bool:
        return UNCACHED[part] in settings or any(is_true(of(settings, word)) for word in (*ENCODES[part], *more))

    return {
        "text_encoder": "resident" if stays("text_encoder") else "cached",
        "vae": "resident" if stays("vae", "keep_vae_loaded") else "cached",
    }


def write_encoders(fields: Fields) -> Settings:
    """The settings of what encodes while it trains. Raises an InexpressibleError for what waits in host RAM."""
    wrong = [part for part in ENCODES if fields[part] == "swapped"]
    if wrong:
        why = "what it encodes is cached, or the encoder stays on the GPU"
        raise InexpressibleError(*(UnsupportedValue(part, "swapped", "cached", why) for part in wrong))
    return {f"{CONFIG}{words[0]}": True for part, words in ENCODES.items() if fields[part] == "resident"}


def references_of(settings: Settings) -> Fields:
    """Where the data file has no conditioning set, as many as the model usually takes."""
    count = int(settings.get(REFERENCES, 0))
    if not count:
        return {"references": None}
    shape = lookup.model(model_of(settings)["model"]).shape
    if not shape.references and not shape.takes_references:
        raise VplanError("conditioning sets of this model_family are not priced", "leave conditioning_data out")
    return {"references": count if of(settings, "conditioning_multidataset_sampling") == "combined" else 1}


REFERENCE_SETS = f"{DATASET}conditioning_data"


def write_references(fields: Fields) -> Settings:
    """The names of the sets that condition a sample."""
    count = int(fields["references"] or 0)
    if not count:
        return {}
    names = ["my-references", *(f"my-references-{number}" for number in range(2, count + 1))]
    together: Settings = {f"{CONFIG}conditioning_multidataset_sampling": "combined"} if count > 1 else {}
    return {REFERENCE_SETS: names, **together}


def batch_of(settings: Settings) -> Fields:
    """The field `batch_size`: the largest of the config's and its sets'."""
    size = settings.get(BATCH) or of(settings, "train_batch_size")
    return {"batch_size": integer(size, "train_batch_size")}
