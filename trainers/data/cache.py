"""The cache of encoded samples: latents of clips and embeddings of captions, encoded once for all training steps.

One safetensors file for each clip at its shape and one for each caption, named by a hash of all that it depends on: the
file's content, the frames taken, the shape, the encoders' own files, their settings, the dtype and the version of the
family's code. A file is written aside, synced and renamed, so one under its final name is whole; a killed run loses
only what it was encoding. Ranks and runs may share a folder: each of n ranks encodes every n-th sample.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from planner.catalog.profiles import ModelProfile
from planner.catalog.shapes import sample_grid
from planner.dataset.clips import UnusableError
from planner.dataset.scan import Dataset, Fault, Sample, refused
from planner.errors import VplanError
from planner.spec.job import QUANTISED, Job, Strategy
from planner.units import format_gib
from trainers import families
from trainers.data import layer_offload, parts
from trainers.data.decoding import Decoded, FrameRange, SampleFiles, decoded, processes_for
from trainers.data.entries import CachedSample, with_partner
from trainers.data.packed_encoders import shrink
from trainers.data.store import BackgroundWriter, Digests, Store, one_at_a_time
from trainers.families.common.base import Family
from trainers.families.common.encoding import Encoder, EncoderTurn
from trainers.step import backends
from trainers.step.step import DTYPES, compute_dtype

FORMAT = 1
TELL_SECONDS = 0.25
Item = TypeVar("Item")
Made = tuple[str, Any, Mapping[str, Tensor] | UnusableError]
"""A sample's key, the sample (a clip's, or a caption), and an encoder's output for it, or why there is none."""


def _alone() -> None:
    """Does nothing: a single process has no other ranks to wait for."""


def _silent(**_: Any) -> None:
    """Ignores what it is told."""


@dataclass(frozen=True)
class EncodingTask:
    """What to encode for, and where: plan, source model, cache folder, device, and the ranks that share the work."""

    profile: ModelProfile
    job: Job
    strategy: Strategy
    source: str
    """the model: a diffusers folder, or a hub id"""
    folder: Path
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    ranks: int = 1
    wait: Callable[[], None] = _alone
    """returns when all ranks have called it"""
    tell: Callable[..., None] = _silent
    """called with the progress (``doing``, ``done`` of ``all``) and with the samples that were left out (``broken``)"""


def cached(dataset: Dataset, setting: EncodingTask, *, skip_bad: bool = False) -> list[CachedSample]:
    """Encodes what is not cached yet and returns the samples in the dataset's order, the same on every rank.

    Raises a VplanError for a model that cannot be loaded safely, a clip that cannot be decoded (with `skip_bad` it is
    left out), encoder outputs of other shapes than the plan's model takes, and a full disk.
    """
    work = CacheBuild(setting)
    clip_keys = work.clip_keys(dataset)
    if work.family.captioned:
        # With the empty caption: it is the negative prompt of validation samples, and replaces dropped captions.
        captions = ["", *dict.fromkeys(sample.clip.caption for sample in dataset.samples)]
        work.encode("captions", work.text_turns, {work.text_key(caption): caption for caption in captions})
    work.encode("clips", work.clip_turns, dict(zip(clip_keys, dataset.samples, strict=True)), skip_bad=skip_bad)
    store, entries, broken = work.store, [], []
    files = {(sample.clip.path, sample.flip): number for number, sample in enumerate(dataset.samples)}
    for key, sample in zip(clip_keys, dataset.samples, strict=True):
        if skip_bad and (fault := store.fault(key)) is not None:
            broken.append(str(Fault(sample.clip.name, fault)))
            continue
        text = store.path(work.text_key(sample.clip.caption) if work.family.captioned else key)
        of_clip = files[sample.clip.path, sample.flip] if setting.profile.shape.window else None
        empty = store.path(work.text_key("")) if work.family.captioned else None
        entries.append(
            CachedSample(store.path(key), text, sample.bucket, of_clip, sample.repeats, sample.weight, empty)
        )
    if setting.profile.shape.window:
        entries = with_partner(entries)
    if not entries:
        faults = [Fault(sample.clip.name, "breaks while it is decoded") for sample in dataset.samples]
        raise refused(faults, len(faults))
    setting.tell(broken=broken)
    return entries


def _free(encoder: Encoder) -> None:
    """Frees an encoder's memory before the next one is loaded."""
    remaining = weakref.ref(encoder.model)
    encoder.drop_model()
    if remaining() is not None:  # it is held by a reference cycle
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _mirrored(pictures: Tensor, sample: Sample) -> Tensor:
    """Pictures (F, H, W, 3), mirrored if the sample is."""
    return pictures.flip(2) if sample.flip else pictures


class CacheBuild:
    """Fills the cache of encoded clips and captions for one setting (model, plan, folder, rank)."""

    def __init__(self, setting: EncodingTask) -> None:
        self.setting = setting
        self.family: Family = families.family(setting.profile)
        self.clip_turns, self.text_turns = self.family.clip_turns(), self.family.text_turns()
        if not (self.clip_turns and (self.text_turns or not self.family.captioned)):
            fault = f"samples of family {setting.profile.family} ({setting.profile.name}) cannot be encoded yet"
            raise VplanError(fault, "train a model of another family: `vplan models` lists them")
        self.references = setting.job.references or setting.profile.shape.references
        if self.references > (1 if self.family.reads_reference else 0):
            fault = f"{self.references} reference images per sample cannot be read from a folder of clips yet"
            raise VplanError(fault, f"set references = {int(self.family.reads_reference)}")
        self.dtype = compute_dtype(setting.strategy)
        self.tokens = sample_grid(setting.profile, setting.job)["T"]
        turns = (*self.clip_turns, *self.text_turns)
        self.root = parts.locate(setting.source, [part for turn in turns for part in (turn.part, turn.helper) if part])
        self.files = {turn.part: parts.check(self.root, turn.part, turn.class_name) for turn in turns}
        self.files |= {turn.helper: parts.check_helper(self.root, turn.helper) for turn in turns if turn.helper}
        self.store = Store(setting.folder)
        self.digests = Digests(setting.folder, setting.rank)
        self._sides = {"clip": self._about("clip", self.clip_turns), "text": self._about("text", self.text_turns)}

    def _model_digest(self, turns: tuple[EncoderTurn, ...]) -> dict[str, str]:
        """The hash of every file of some turns' encoders, by name."""
        folders = [part for turn in turns for part in (turn.part, turn.helper) if part]
        files = {f"{part}/{path.name}": path for part in folders for path in self.files[part]}
        self._share(list(files.values()))
        return {name: self.digests.of(path) for name, path in files.items()}

    def _share(self, files: list[Path]) -> None:
        """Hashes files, each rank its part of them; then every rank reads all hashes."""
        for path in files[self.setting.rank :: self.setting.ranks]:
            self.digests.of(path)
        self.setting.wait()
        self.digests.read()

    def _about(self, side: str, turns: tuple[EncoderTurn, ...]) -> str:
        """What all samples of a side, ``clip`` or ``text``, depend on, as JSON."""
        profile, strategy = self.setting.profile, self.setting.strategy
        batch = self.family.batch({**sample_grid(profile, self.setting.job), "B": 1}, "meta", self.dtype)
        facts = {
            "format": FORMAT,
            "family": [profile.family, self.family.encoding],
            "side": side,
            "encoders": self._model_digest(turns),
            "dtypes": {turn.part: self._dtype_of(turn) for turn in turns},
            # sibling models share encoders but cache other tensors of a clip (a condition, padded frames)
            "holds": sorted(self.family.cached_tensors(batch)),
            "stored": str(self.dtype),
        }
        if side == "clip":
            facts |= {"config": profile.config, "inputs": profile.inputs, "tiling": strategy.vae_tiling}
        return json.dumps(facts, sort_keys=True)

    def clip_keys(self, dataset: Dataset) -> list[str]:
        """The cache key of each sample's encoded clip, in the dataset's order."""
        companions = [self.companions(sample) for sample in dataset.samples]
        self._share(
            [
                *(sample.clip.path for sample in dataset.samples),
                *(path for paths in companions for path in paths.values()),
            ]
        )
        keys = []
        for sample, companion_paths in zip(dataset.samples, companions, strict=True):
            bucket = sample.bucket
            shape = [bucket.frames, bucket.height, bucket.width]
            mirrored = {"flip": True} if sample.flip else {}  # no entry otherwise, so that older caches stay valid
            companion_digests = {name: self.digests.of(path) for name, path in companion_paths.items()}
            keys.append(
                self._key(
                    "clip",
                    file=self.digests.of(sample.clip.path),
                    shape=shape,
                    indices=sample.indices,
                    **companion_digests,
                    **mirrored,
                )
            )
        return keys

    def companions(self, sample: Sample) -> dict[str, Path]:
        """The files besides the clip that a sample is encoded with (`reference`, `control`) if the model takes them."""
        accepts = {"reference": self.references, "control": self.setting.profile.inputs.get("control_channels")}
        paths = {"reference": sample.clip.reference, "control": sample.clip.control}
        return {name: path for name, path in paths.items() if path is not None and accepts[name]}

    def text_key(self, caption: str) -> str:
        """The cache key of an encoded caption."""
        return self._key("text", caption=caption, tokens=self.tokens)

    def _key(self, side: str, **sample: Any) -> str:
        return hashlib.sha256((self._sides[side] + json.dumps(sample, sort_keys=True)).encode()).hexdigest()

    def encode(
        self, title: str, turns: tuple[EncoderTurn, ...], samples: Mapping[str, Any], *, skip_bad: bool = False
    ) -> None:
        """Runs every turn over this rank's part of the samples that are not cached yet, one encoder after another."""
        if self.setting.rank == 0:
            self.store.sweep()
        # Divided among the ranks before cached samples are left out: other ranks write to the store meanwhile, so
        # each would count differently.
        mine = dict(list(samples.items())[self.setting.rank :: self.setting.ranks])
        todo = {key: sample for key, sample in mine.items() if not self.store.has(key)}
        for number, turn in enumerate(turns):
            last = number == len(turns) - 1
            waiting = {k: s for k, s in todo.items() if last or not self.store.has(k, number)}
            waiting = {k: s for k, s in waiting.items() if not (skip_bad and self.store.fault(k))}
            if not waiting:
                continue
            # One encoder at a time, over all samples: two may not fit on the device together.
            with self._decoded(turn, waiting) as decoding, BackgroundWriter(self.store) as writer:
                encoder = self._load(turn)
                items = self._one_by_one(f"{title} ({turn.part})", waiting)
                made: Iterator[Made]
                if decoding is None:
                    made = self._of_captions(turn, encoder, items, number)
                else:
                    made = self._of_clips(turn, encoder, zip(items, decoding, strict=True))
                for index, (key, sample, tensors) in enumerate(made):
                    if isinstance(tensors, UnusableError):
                        if not skip_bad:
                            raise refused([Fault(sample.clip.name, str(tensors))], len(samples))
                        self.store.mark(key, str(tensors))
                        continue
                    saving = self._keep(writer, key, tensors, sample, number, last=last)
                    if index == 0:
                        self._check_space(saving.result() * (len(waiting) - 1))
            _free(encoder)
        self.setting.wait()

    def _load(self, turn: EncoderTurn) -> Encoder:
        """The encoder of a turn on the device, set up as the strategy says."""
        # It is whole in host RAM before it moves to the device, and host RAM may have room for one rank's only.
        with one_at_a_time(self.setting.folder) if self.setting.ranks > 1 else contextlib.nullcontext():
            return self._loaded(turn)

    def _loaded(self, turn: EncoderTurn) -> Encoder:
        strategy, dtype = self.setting.strategy, self._dtype_of(turn)
        is_vae = turn.part == "vae"
        model = parts.load(self.root, turn.part, turn.class_name, DTYPES.get(dtype, torch.bfloat16))
        if is_vae and strategy.vae_tiling:
            model.enable_tiling()  # type: ignore[operator]  # diffusers' own method
        if is_vae and strategy.vae_slicing:
            model.enable_slicing()  # type: ignore[operator]  # likewise
        helper = parts.load_helper(self.root, turn.helper) if turn.helper else None
        place = self.setting.device
        if dtype in QUANTISED:
            model = shrink(model, dtype, place)
        elif not is_vae and layer_offload.is_too_large(model, layer_offload.room_bytes(place)):
            model = layer_offload.bring_layers(model, place)
        else:
            model = model.to(place)
        return Encoder(model, helper, self.tokens)

    def _dtype_of(self, turn: EncoderTurn) -> str:
        return self.setting.strategy.vae_dtype if turn.part == "vae" else self.setting.strategy.text_encoder_dtype

    @contextlib.contextmanager
    def _decoded(self, turn: EncoderTurn, samples: Mapping[str, Any]) -> Iterator[Iterator[Decoded] | None]:
        """Yields the frames that a turn reads from the samples' files, in order; None for captions."""
        if not any(isinstance(sample, Sample) for sample in samples.values()):
            yield None
            return
        files = [self._files_of(turn, sample) for sample in samples.values()]
        processes = processes_for(files, self.setting.ranks)
        with decoded(files, processes) as decoding, backends.fewer_threads(processes):
            yield decoding

    def _files_of(self, turn: EncoderTurn, sample: Sample) -> SampleFiles:
        """Which frames a turn reads from a clip and from the files beside it."""
        indices, size = sample.indices[: turn.frames], (sample.bucket.height, sample.bucket.width)
        companions = {
            name: FrameRange(path, indices if name == "control" else (0,), *size)
            for name, path in self.companions(sample).items()
        }
        return {"clip": FrameRange(sample.clip.path, indices, *size), **companions}

    def _of_captions(
        self, turn: EncoderTurn, encoder: Encoder, captions: Iterable[tuple[str, str]], number: int
    ) -> Iterator[Made]:
        """Yields an encoder's output for each caption, in order. ``number``: of the encoder's turn."""
        # On a GPU one at a time: the estimate is for one caption, and T5 keeps the GPU busy with one.
        at_once = turn.at_once if self.setting.device.type == "cpu" else 1
        remaining = iter(captions)
        while several := list(itertools.islice(remaining, at_once)):
            if turn.reads_earlier:
                encoder.earlier = self._left_by(number, several[0][0])
            with torch.inference_mode():
                tensors = turn.encode(encoder, [caption for _, caption in several])
            for place, (key, caption) in enumerate(several):
                yield key, caption, {name: tensor[place] for name, tensor in tensors.items()}

    def _of_clips(
        self, turn: EncoderTurn, encoder: Encoder, clips: Iterable[tuple[tuple[str, Sample], Decoded]]
    ) -> Iterator[Made]:
        """Yields an encoder's output for each clip, in order, or the UnusableError of a broken one."""
        for (key, sample), frames in clips:
            try:
                yield key, sample, self._clip_tensors(turn, encoder, key, sample, frames)
            except UnusableError as error:
                yield key, sample, error

    def _clip_tensors(
        self, turn: EncoderTurn, encoder: Encoder, key: str, sample: Sample, frames: Decoded
    ) -> Mapping[str, Tensor]:
        """An encoder's output for one clip's ``frames``. Raises an UnusableError if they could not be decoded, and for
        broken sound."""
        if isinstance(frames, UnusableError):
            raise frames
        # Seeded by the sample's key, so that its latents are the same whichever rank encodes it, and after an
        # interruption.
        encoder.generator = torch.Generator().manual_seed(int(key[:15], 16))
        clip = sample.clip
        encoder.size = (clip.height, clip.width)
        encoder.source, encoder.times = clip.path, tuple(map(clip.seconds, sample.indices)) if clip.fps else ()
        pictures = {role: _mirrored(torch.from_numpy(pixels), sample) for role, pixels in frames.items()}
        encoder.reference, encoder.control = pictures.get("reference"), pictures.get("control")
        with torch.inference_mode():
            return turn.encode(encoder, pictures["clip"])

    def _keep(
        self, writer: BackgroundWriter, key: str, tensors: Mapping[str, Tensor], sample: Any, number: int, *, last: bool
    ) -> Future[int]:
        """Saves a turn's output for later turns, or, for the last turn, joined with the outputs of earlier ones. The
        future gives the file's bytes when it is written."""
        if not last:
            return writer.save(key, {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, number)
        fitted = self._fitted(self.family.joined({**self._left_by(number, key), **tensors}), sample)
        return writer.save(key, fitted, drop_turns=number)

    def _left_by(self, number: int, key: str) -> dict[str, Tensor]:
        """The outputs for a sample of the turns before the one of this number."""
        parts_made: dict[str, Tensor] = {}
        for earlier in range(number):
            parts_made |= self.store.load(key, earlier)
        return parts_made

    def _fitted(self, tensors: Mapping[str, Tensor], sample: Any) -> dict[str, Tensor]:
        """The tensors in the dtypes of the plan's batches. Raises a VplanError for other shapes, or for values that are
        not finite."""
        shape = sample.bucket if isinstance(sample, Sample) else self.setting.job.shapes[0]
        job = self.setting.job
        batch = self.family.batch({**sample_grid(self.setting.profile, job, shape), "B": 1}, "meta", self.dtype)
        fitted, templates = {}, self.family.cached_tensors(batch)
        for name, tensor in tensors.items():
            template = templates[name]
            lengths = zip(tensor.shape, template.shape, strict=False)
            fits = all(a <= b for a, b in lengths) if name in self.family.ragged else tensor.shape == template.shape
            if not fits or tensor.ndim != template.ndim:
                sizes = f"{name} of {list(tensor.shape)}, but {self.setting.profile.name} takes {list(template.shape)}"
                fix = "pass the model of the plan, or plan for this one"
                raise VplanError(f"the encoders of {self.root.name} give {sizes}", fix)
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                label = sample.clip.name if isinstance(sample, Sample) else "a caption"
                fix = "use --vae-dtype fp32" if isinstance(sample, Sample) else "use --text-encoder-dtype fp32"
                raise VplanError(f"encoding {label} gave {name} that are not finite (overflow in half precision)", fix)
            fitted[name] = tensor.to(template.dtype).contiguous().cpu()
        return fitted

    def _check_space(self, nbytes: int) -> None:
        """Raises a VplanError if the disk is too small for what all ranks will write. ``nbytes``: this rank's part,
        estimated from its first file."""
        needed_bytes, free_bytes = nbytes * self.setting.ranks, shutil.disk_usage(self.setting.folder).free
        if needed_bytes > free_bytes:
            room = f"{format_gib(free_bytes)} is free in {self.setting.folder}"
            fault = f"caching needs about {format_gib(needed_bytes)} more, and {room}"
            raise VplanError(fault, "free some space, or choose another folder; the cache so far is kept", exit_code=4)

    def _one_by_one(self, title: str, items: Mapping[str, Item]) -> Iterable[tuple[str, Item]]:
        """Yields the items, and reports now and then how many are done, for the parent process to show."""
        last_told = 0.0
        for number, item in enumerate(items.items()):
            if time.monotonic() - last_told > TELL_SECONDS:
                self.setting.tell(doing=title, done=number, all=len(items))
                last_told = time.monotonic()
            yield item
