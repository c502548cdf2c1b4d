"""Which sample comes when: the order of a run, its split over ranks, and files stacked into batches."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.spec.job import Bucket, Job  # noqa: E402
from trainers.data import loader  # noqa: E402
from trainers.data.loader import BatchSampler, CachedSample, Loader, Stacker, read_entries, write_entries  # noqa: E402
from trainers.families import family  # noqa: E402
from trainers.families.common import random_draws  # noqa: E402
from trainers.families.common.random_draws import SEEDS  # noqa: E402

JOB = Job(model="wan2.1-t2v-1.3b", frames=5, height=32, width=32)


def job(*counts: int, batch_size: int = 1) -> Job:
    """With the shapes of `entries`."""
    shapes = tuple(Bucket(frames=1 + 4 * shape, height=32, width=32) for shape in range(len(counts)))
    return JOB.replace(buckets=shapes, batch_size=batch_size)


def entries(*counts: int) -> list[CachedSample]:
    """So many samples of each of several shapes."""
    return [
        CachedSample(Path(f"{shape}-{number}"), Path("text"), Bucket(frames=1 + 4 * shape, height=32, width=32))
        for shape, count in enumerate(counts)
        for number in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    batch=st.integers(1, 3),
    world=st.integers(1, 3),
    accumulation=st.integers(1, 2),
    seed=st.integers(0, 5),
)
def test_every_sample_comes_in_every_epoch_and_steps_have_one_shape(
    counts: list[int], batch: int, world: int, accumulation: int, seed: int
) -> None:
    sampler = BatchSampler(entries(*counts), job(*counts, batch_size=batch), world, accumulation, seed)
    for epoch in range(2):
        first = epoch * sampler.steps_per_epoch
        steps = [sampler.step(first + number) for number in range(sampler.steps_per_epoch)]
        seen = Counter(itertools.chain.from_iterable(step.samples for step in steps))
        assert set(seen) == set(range(sum(counts)))
        for step in steps:
            assert len(step.samples) == batch * world * accumulation
            assert {sampler.entries[number].bucket for number in step.samples} == {step.bucket}
        for shape, count in enumerate(counts):  # filled up, and by less than a batch
            own = [times for number, times in seen.items() if sampler.entries[number].bucket.frames == 1 + 4 * shape]
            assert sum(own) - count < batch * world * accumulation


def test_the_order_is_of_the_seed_and_the_epoch() -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        sampler = BatchSampler(entries(20, 20), job(20, 20), 1, 1, seed)
        return [sampler.step(epoch * sampler.steps_per_epoch + number) for number in range(sampler.steps_per_epoch)]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


@pytest.mark.parametrize(("batch", "world", "accumulation"), [(2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 1, 2), (4, 1, 1)])
def test_the_global_batch_is_the_same_however_it_is_split(batch: int, world: int, accumulation: int) -> None:
    whole = BatchSampler(entries(10), job(10, batch_size=4), 1, 1, 0)
    split = BatchSampler(entries(10), job(10, batch_size=batch), world, accumulation, 0)
    assert [whole.step(number).samples for number in range(9)] == [split.step(number).samples for number in range(9)]


def test_a_position_is_taken_up_by_the_same_order_only() -> None:
    sampler = BatchSampler(entries(5, 3), job(5, 3), 1, 1, 0)
    position = sampler.position(7)
    assert BatchSampler(entries(5, 3), job(5, 3), 1, 1, 0).resume(position) == 7
    for other in (
        BatchSampler(entries(5, 4), job(5, 4), 1, 1, 0),
        BatchSampler(entries(5, 3), job(5, 3), 2, 1, 0),
        BatchSampler(entries(5, 3), job(5, 3), 1, 1, 1),
    ):
        with pytest.raises(VplanError, match="differs from the checkpoint's"):
            other.resume(position)


def test_a_shape_that_the_plan_does_not_have_is_never_drawn() -> None:
    """Entries of an earlier plan: what was planned says nothing of their memory."""
    with pytest.raises(VplanError, match="of 9x32x32, a shape that the plan does not have"):
        BatchSampler(entries(2, 2, 2), job(2, 2), 1, 1, 0)


def test_the_plan_says_the_batch_size_of_a_shape() -> None:
    made = [entry._replace(bucket=entry.bucket.replace(batch_size=7)) for entry in entries(6)]
    assert BatchSampler(made, job(6, batch_size=2), 1, 1, 0).step(0).batch_size == 2


def test_what_is_new_and_what_is_gone_is_counted() -> None:
    before = entries(3, 1)
    assert loader.changes(before, before[::-1]) == ()
    other_batch = [entry._replace(bucket=entry.bucket.replace(batch_size=2)) for entry in before]
    assert loader.changes(before, other_batch) == ()
    (words,) = loader.changes(before, entries(1, 2))
    assert words.endswith(": 1 sample new, 2 samples gone, and not trained on")
    caption = [entry._replace(text=Path("another")) for entry in before]
    assert "4 samples new, 4 samples gone" in loader.changes(before, caption)[0]


def test_no_sample_is_refused() -> None:
    with pytest.raises(VplanError, match="no samples to train on"):
        BatchSampler([], JOB, 1, 1, 0)


# ---- files


def stacker(name: str) -> Stacker:
    profile = lookup.model(name)
    frames = 5 if profile.kind == "video" else 1
    job = Job(model=name, frames=frames, height=64, width=64)
    return Stacker(profile, job, family(profile), torch.bfloat16)


def write(folder: Path, made: Stacker, count: int) -> list[CachedSample]:
    bucket = Bucket(frames=made.job.frames, height=64, width=64)
    found = []
    for number in range(count):
        template = made.template(bucket)
        sample = {name: torch.full(tensor.shape, float(number)).to(tensor.dtype) for name, tensor in template.items()}
        save_file({"latents": sample.pop("latents")}, folder / f"{number}.l")
        save_file(sample, folder / f"{number}.t")
        found.append(CachedSample(folder / f"{number}.l", folder / f"{number}.t", bucket))
    return found


@pytest.mark.parametrize("name", ["wan2.1-t2v-1.3b", "cogvideox-2b", "flux.1-dev", "sd1.5", "qwen-image"])
def test_stacked_files_are_a_batch_of_the_family(name: str, tmp_path: Path) -> None:
    made = stacker(name)
    batch = made.batch(write(tmp_path, made, 3))
    grid = lookup.grid(made.profile, made.job)
    wanted = made.kind.batch({**grid, "B": 3}, "meta", torch.bfloat16)
    assert {key: (t.shape, t.dtype) for key, t in batch.items()} == {k: (t.shape, t.dtype) for k, t in wanted.items()}
    assert [float(sample.flatten()[0]) for sample in batch["latents"]] == [0, 1, 2]


def test_a_shorter_prompt_is_filled_up_where_the_family_does_that(tmp_path: Path) -> None:
    made = stacker("qwen-image")
    long, short = write(tmp_path, made, 2)
    prompt = load_file(short.text)["prompt"]
    save_file({"prompt": prompt[:7].contiguous()}, short.text)
    batch = made.batch([long, short])
    assert batch["prompt"].shape == (2, *prompt.shape)
    assert batch["prompt_mask"].sum(dim=1).tolist() == [prompt.shape[0], 7]
    save_file({"prompt": torch.cat([prompt, prompt])}, short.text)
    with pytest.raises(VplanError, match=r"prompt in 1\.t has the shape"):
        made.batch([long, short])


def test_what_a_file_lacks_or_has_in_another_shape_is_named(tmp_path: Path) -> None:
    made = stacker("wan2.1-t2v-1.3b")
    (entry,) = write(tmp_path, made, 1)
    latents = load_file(entry.path)["latents"]
    save_file({"latents": latents[:, :1].contiguous()}, entry.path)
    with pytest.raises(VplanError, match=r"latents in 0\.l has the shape"):
        made.batch([entry])
    save_file({"other": latents}, entry.path)
    with pytest.raises(VplanError, match="have no latents"):
        made.batch([entry])
    header = b'{"latents":{"dtype":"F8_E8M0","shape":[%d],"data_offsets":[0,%d]}}'
    for size in (8, loader.SMALL_BYTES):  # a small file is read, a large one mapped
        whole = header % (size, size)
        odd = len(whole).to_bytes(8, "little") + whole + bytes(size)
        for data in (b"nothing" + bytes(size), odd[:-1], odd):
            entry.path.write_bytes(data)
            with pytest.raises(VplanError, match=r"it is damaged|has the shape"):
                made.batch([entry])
    entry.path.unlink()
    with pytest.raises(VplanError, match="cannot read"):
        made.batch([entry])


def test_ranks_and_micro_batches_share_samples_and_seeds(tmp_path: Path) -> None:
    """What two ranks with two micro-batches see is what one process sees at once, noise included."""
    made = stacker("wan2.1-t2v-1.3b")
    found = write(tmp_path, made, 8)

    def seen(batch_size: int, world: int, accumulation: int) -> list[tuple[float, int, float]]:
        sampler = BatchSampler(found, made.job.replace(batch_size=batch_size), world, accumulation, 3)
        rows = []
        for rank in range(world):
            own = Loader(sampler, made, rank, torch.device("cpu"), 2)
            for batch in own.batches(1):
                with random_draws.from_seeds(batch[SEEDS], torch.device("cpu")):
                    noise = random_draws.normal_like(batch["latents"].float())
                firsts = [float(sample.flatten()[0]) for sample in batch["latents"]]
                rows += list(zip(firsts, batch[SEEDS].tolist(), [float(n.sum()) for n in noise], strict=True))
            own.close()
        return sorted(rows)

    assert seen(4, 1, 1) == seen(1, 2, 2) == seen(2, 2, 1)


def test_draws_come_from_torch_without_seeds() -> None:
    torch.manual_seed(5)
    wanted = torch.randn(2, 3), torch.randn(2), torch.randint(0, 9, (2,))
    torch.manual_seed(5)
    device = torch.device("cpu")
    found = (
        random_draws.normal_like(torch.empty(2, 3)),
        random_draws.normal(2, device),
        random_draws.integers(9, 2, device),
    )
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_every_sample_draws_from_a_generator_of_its_own() -> None:
    """Noise and level of a sample are those that its seed alone gives; torch's own draws are the first one's."""
    device, seeds = torch.device("cpu"), torch.tensor([3, 2**62, 11])
    with random_draws.from_seeds(seeds, device):
        found = random_draws.normal_like(torch.empty(3, 4, 5)), random_draws.uniform(3, device), torch.rand(2)
    each = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
    noise = torch.stack([torch.randn(4, 5, generator=generator) for generator in each])
    shares = torch.cat([torch.rand(1, dtype=torch.float64, generator=generator) for generator in each])
    torch.manual_seed(3)
    assert all(torch.equal(*pair) for pair in zip(found, (noise, shares, torch.rand(2)), strict=True))


def test_lists_of_entries_may_be_moved_with_their_folder(tmp_path: Path) -> None:
    made = [CachedSample(tmp_path / "a" / "x", Path("/elsewhere/y"), Bucket(frames=1, height=32, width=32))]
    (tmp_path / "a").mkdir()
    write_entries(tmp_path / "a" / "entries.jsonl", made)
    assert read_entries(tmp_path / "a" / "entries.jsonl") == made
    (tmp_path / "a").rename(tmp_path / "b")
    assert read_entries(tmp_path / "b" / "entries.jsonl")[0].path == tmp_path / "b" / "x"
    (tmp_path / "b" / "entries.jsonl").write_text("[]\n")
    with pytest.raises(VplanError, match="not a list of cached samples"):
        read_entries(tmp_path / "b" / "entries.jsonl")
