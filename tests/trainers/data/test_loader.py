"""Files stacked into batches, and the micro-batches of every rank with the seeds of their samples."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from planner.catalog import lookup  # noqa: E402
from planner.errors import VplanError  # noqa: E402
from planner.spec.job import Bucket, Job  # noqa: E402
from trainers.data import loader  # noqa: E402
from trainers.data.entries import CachedSample  # noqa: E402
from trainers.data.loader import Loader, Stacker  # noqa: E402
from trainers.data.sampler import BatchSampler  # noqa: E402
from trainers.families import family  # noqa: E402
from trainers.families.common import random_draws  # noqa: E402
from trainers.families.common.random_draws import SEEDS  # noqa: E402
from trainers.step.step import WEIGHT  # noqa: E402


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
    wanted = made.family.batch({**grid, "B": 3}, "meta", torch.bfloat16)
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


def test_dropped_captions_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    made = stacker("wan2.1-t2v-1.3b")
    empty = tmp_path / "empty"
    found = [entry._replace(empty=empty) for entry in write(tmp_path, made, 8)]
    save_file({"prompt": torch.full_like(load_file(found[0].text)["prompt"], 99.0)}, empty)

    def dropped(world: int, share: float, steps: range) -> list[tuple[int, bool]]:
        sampler = BatchSampler(found, made.job.replace(batch_size=4 // world), world, 1, 3)
        rows = []
        for number in steps:
            for rank in range(world):
                own = Loader(sampler, made, rank, torch.device("cpu"), 99, share)
                for batch in own.batches(number):
                    empties = [bool((prompt == 99.0).all()) for prompt in batch["prompt"]]
                    rows += list(zip(batch[SEEDS].tolist(), empties, strict=True))
                own.close()
        return sorted(rows)

    alone = dropped(1, 0.3, range(75))
    assert alone == dropped(2, 0.3, range(75))
    assert sum(is_empty for _, is_empty in alone) / len(alone) == pytest.approx(0.3, abs=0.08)
    assert not any(is_empty for _, is_empty in dropped(1, 0.0, range(3)))
    assert all(is_empty for _, is_empty in dropped(1, 1.0, range(3)))
    resumed = dropped(1, 0.3, range(40, 75))
    assert resumed == [row for row in alone if row in resumed]
    sampler = BatchSampler(write(tmp_path, made, 2), made.job, 1, 1, 3)
    with pytest.raises(VplanError, match="names no empty caption"):
        Loader(sampler, made, 0, torch.device("cpu"), 9, 0.1)


def test_a_batch_says_its_weight(tmp_path: Path) -> None:
    """Of a shape with fewer samples than a micro-batch."""
    made = stacker("wan2.1-t2v-1.3b")
    few, many = Bucket(frames=1, height=64, width=64), Bucket(frames=5, height=64, width=64)
    entries = [entry._replace(bucket=many) for entry in write(tmp_path, made, 4)]
    (tmp_path / "few").mkdir()
    lone = write(tmp_path / "few", Stacker(made.profile, made.job.replace(frames=1), made.family, made.dtype), 1)
    entries.append(lone[0]._replace(bucket=few))
    sampler = BatchSampler(entries, made.job.replace(buckets=(few, many), batch_size=2), 1, 1, 0)
    own = Loader(sampler, made, 0, torch.device("cpu"), 6)
    found = [(len(batch["latents"]), float(batch[WEIGHT])) for number in range(6) for batch in own.batches(number)]
    own.close()
    assert sorted(found) == [(1, 0.5)] * 2 + [(2, 1.0)] * 4


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


@pytest.mark.parametrize("size", [64, 600])  # read, and mapped
@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_damaged_sample_of_the_run_s_own_cache_is_put_aside_and_made_again(
    tmp_path: Path, damage: str, size: int
) -> None:
    from trainers.data.store import Store

    made = stacker("wan2.1-t2v-1.3b")
    made.own_cache = tmp_path / "cache"
    store = Store(made.own_cache)
    tensors = {"latents": torch.randn(size, size).bfloat16(), "empty": torch.zeros(0, 3), "one": torch.tensor(3)}
    store.save("ab" * 32, tensors)
    path = store.path("ab" * 32)
    assert (path.stat().st_size > loader.SMALL_BYTES) == (size == 600)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in made._read(path).items())
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:  # one bit of its values, of which a header says nothing
        path.write_bytes(whole[:-100] if damage == "cut" else whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(VplanError, match="cannot read") as caught:
        made._read(path)
    assert "encoded again" in caught.value.fix
    assert not store.has("ab" * 32)  # so the next start encodes it
    store.save("ab" * 32, tensors)
    assert torch.equal(made._read(path)["latents"], tensors["latents"])


def test_a_damaged_sample_of_a_cache_that_others_made_stays(tmp_path: Path) -> None:
    from trainers.data.store import Store

    store = Store(tmp_path)
    store.save("cd" * 32, {"latents": torch.ones(8)})
    path = store.path("cd" * 32)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(VplanError, match="it is damaged") as caught:
        stacker("wan2.1-t2v-1.3b")._read(path)
    assert path.is_file() and "restore the file" in caught.value.fix
