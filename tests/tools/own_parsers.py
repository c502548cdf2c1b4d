"""Gives exported files to the trainers' own parsers, config loaders and assertions, from their repositories.

    python -m tests.tools.exported_grid rows.jsonl --files FILES
    python -m tests.tools.own_parsers MIRRORS FILES [--targets a,b] [-v]

MIRRORS holds clones by the names in `SOURCES`; the commits are those of `profiles/trainers`. Each trainer's code runs
in a process of its own, from its command line on as far as it goes without weights and data (`_stop_at`). Libraries
that are not installed are stood in for, of its imports alone. `PYTHONPATH` may name a folder with small ones:
`pip install --target DIR --no-deps toml voluptuous oyaml imagesize easydict omegaconf colorama`.
ai-toolkit's commit imports what diffusers 0.41 moved: `pip install --target DIR --no-deps diffusers==0.40.0 httpx
httpcore h11 anyio sniffio` for it alone.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import MagicMock

HERE = __file__

SOURCES = {
    "ai-toolkit": ("ostris+ai-toolkit", "27a03a91"),
    "diffsynth": ("modelscope+DiffSynth-Studio", "fed7b18f"),
    "diffusers": ("huggingface+diffusers", "58eb52c0"),
    "diffusion-pipe": ("tdrussell+diffusion-pipe", "8f83dbf2"),
    "easyanimate": ("aigc-apps+EasyAnimate", "c2a70d17"),
    "latentsync": ("bytedance+LatentSync", "a229c394"),
    "musubi-tuner": ("kohya-ss+musubi-tuner", "30c658c4"),
    "sd-scripts": ("kohya-ss+sd-scripts", "48d368fa"),
    "simpletuner": ("bghira+SimpleTuner", "bc8e6ab7"),
    "videox-fun": ("aigc-apps+VideoX-Fun", "804a4258"),
    "accelerate": ("", "installed"),
}
"""Target -> clone, and the commit that its record in profiles/trainers was read at; accelerate is the installed one."""


class Accepted(Exception):
    """Raised where weights or data would be read: everything up to there was accepted."""


def _stop(*_args: Any, **_named: Any) -> Any:
    raise Accepted


# ---- in the trainer's process


def _asks(frame: FrameType) -> bool:
    """Whether this is `importlib.util.find_spec`."""
    return frame.f_code.co_filename.endswith(("importlib/util.py", "importlib.util>"))


class Absent(ModuleType):
    """A module that is not installed: its names with a capital are classes, all others take any call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {"__init__": lambda own, *_a, **_k: None}) if name[0].isupper() else MagicMock()
        setattr(self, name, found)
        return found


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not installed, for imports from the trainer's own files."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        frame = sys._getframe(1)
        while (
            frame and not _asks(frame) and ("importlib" in frame.f_code.co_filename or frame.f_code.co_filename == HERE)
        ):
            frame = frame.f_back  # type: ignore[assignment]
        if frame and _asks(frame):
            return None  # somebody asks whether it is installed
        if name.startswith("simpletuner."):
            return None  # it does without one of its own that is not there (data_backend/config/__init__.py)
        parent = sys.modules.get(name.rpartition(".")[0])
        if isinstance(parent, Absent) or (frame and frame.f_code.co_filename.startswith(self.root)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        made = Absent(spec.name)
        made.__path__, made.__version__, made.__all__ = [], "99.0.0", []  # type: ignore[attr-defined]
        return made

    def exec_module(self, module: ModuleType) -> None:
        pass


def loaded(path: Path) -> ModuleType:
    """A trainer's script as a module, its folder first on the path as Python starts it."""
    name = "_".join(path.with_suffix("").parts[-3:]).replace("-", "_")
    if name not in sys.modules:
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def by_main(path: Path, _words: list[str]) -> None:
    """The script's `main`, or the lines under `if __name__ == "__main__"`."""
    module = loaded(path)
    _stop_at(module)
    if hasattr(module, "main"):
        module.main()
        return
    text = path.read_text(encoding="utf-8")
    lines = text[text.rindex("if __name__") :]
    exec(compile(lines, str(path), "exec"), {**module.__dict__, "__name__": "__main__"})


def _stop_at(module: ModuleType) -> None:
    """sd-scripts and musubi-tuner: read everything, with an empty data set and no tokenizers, until the accelerator
    (training) or the models (caching) are made."""
    import transformers

    for name in ("CLIPTokenizer", "T5TokenizerFast", "T5Tokenizer", "AutoTokenizer", "Qwen2Tokenizer"):
        if hasattr(transformers, name):
            getattr(transformers, name).from_pretrained = staticmethod(lambda *_a, **_k: MagicMock())
    group = MagicMock(num_train_items=100)
    for other in list(sys.modules.values()):
        own = getattr(other, "__dict__", {})
        if isinstance(other, Absent) or "generate_dataset_group_by_blueprint" not in own:
            continue
        found = (group, None) if os.environ["OWN_PARSERS_TRAINER"] == "sd-scripts" else group
        other.generate_dataset_group_by_blueprint = lambda *_a, _found=found, **_k: _found  # type: ignore[attr-defined]
    for other in list(sys.modules.values()):
        if "analyze_checkpoint_state" in getattr(other, "__dict__", {}):  # FLUX.1's: no schnell, no diffusers' names
            other.analyze_checkpoint_state = lambda *_a: (False, False, (19, 38), [])  # type: ignore[attr-defined]
    for other in list(sys.modules.values()):
        if not isinstance(other, Absent) and "prepare_accelerator" in getattr(other, "__dict__", {}):
            other.prepare_accelerator = _stop  # type: ignore[attr-defined]
    if "_cache_" in (module.__file__ or "") or "/cache_" in (module.__file__ or ""):
        for other in list(sys.modules.values()):
            if "generate_dataset_group_by_blueprint" in getattr(other, "__dict__", {}):
                other.generate_dataset_group_by_blueprint = _stop  # type: ignore[attr-defined]


def by_parser(path: Path, words: list[str]) -> None:
    """The script's `parse_args`, or its `*_parser`."""
    module = loaded(path)
    for name in ("parse_args", "get_args"):
        if hasattr(module, name):
            getattr(module, name)()
            return
    own = [one for name, one in vars(module).items() if name.endswith("_parser") and one.__module__ == module.__name__]
    own[0]().parse_args(words)


def by_function(path: Path, _words: list[str]) -> None:
    """`parse_args` alone: EasyAnimate's modules need a diffusers of 2024."""
    source = ast.parse(path.read_text(encoding="utf-8"))
    alone: list[ast.stmt] = [
        node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "parse_args"
    ]
    names = {"argparse": argparse, "os": os}
    exec(compile(ast.Module(alone, []), str(path), "exec"), names)
    names["parse_args"]()  # type: ignore[operator]


def by_yaml(path: Path, words: list[str]) -> None:
    """LatentSync: its parser, and the config that it names, as its `main` gets it."""
    module = loaded(path)
    module.main = _stop  # type: ignore[attr-defined]
    text = path.read_text(encoding="utf-8")
    exec(compile(text[text.rindex("if __name__") :], str(path), "exec"), {**vars(module), "__name__": "__main__"})


OLD_ARCHES = (
    "sd1",
    "sd2",
    "sd3",
    "sdxl",
    "pixart",
    "pixart_sigma",
    "auraflow",
    "flux",
    "flex1",
    "lumina2",
    "vega",
    "ssd",
)
"""Of ai-toolkit's ModelArch (toolkit/config_modules.py:563), those of its StableDiffusion class."""


def ai_toolkit(path: Path, words: list[str]) -> None:
    """run.py's config, and the records that `BaseSDTrainProcess.__init__` makes of it, with its checks."""
    from toolkit import config_modules as made  # type: ignore[import-not-found]
    from toolkit.config import get_config  # type: ignore[import-not-found]

    config = get_config(os.path.abspath(words[0]))
    for process in config["config"]["process"]:
        model = dict(process["model"])
        train = made.TrainConfig(**process.get("train", {}))
        chosen = made.ModelConfig(**model)
        save = made.SaveConfig(**process.get("save", {}))
        made.SampleConfig(**process.get("sample", {}))
        made.LoggingConfig(**process.get("logging", {}))
        if process.get("network"):
            made.NetworkConfig(**process["network"])
        raw = made.preprocess_dataset_raw_config(process["datasets"])
        made.validate_configs(train, chosen, save, [made.DatasetConfig(**one) for one in raw])
        from toolkit.util.get_model import get_model_class  # type: ignore[import-not-found]

        if get_model_class(chosen).__name__ == "StableDiffusion" and chosen.arch not in OLD_ARCHES:
            raise ValueError(f"arch {chosen.arch!r} is no model of this repository")


def diffusion_pipe(path: Path, words: list[str]) -> None:
    """train.py's flags, its `set_config_defaults`, and that it has a model and an optimizer of these names."""
    import toml  # type: ignore[import-untyped]

    module = loaded(path)
    args = module.parser.parse_args(words)
    config = json.loads(json.dumps(toml.load(args.config)))
    module.set_config_defaults(config)
    source = path.read_text(encoding="utf-8")
    kind = config["model"]["type"]
    if f"'{kind}'" not in source and f'"{kind}"' not in source:
        raise NotImplementedError(f"Model type {kind} is not implemented")
    data = toml.load(config["dataset"])
    assert data["directory"], "directories"
    if config.get("blocks_to_swap"):
        assert config["pipeline_stages"] == 1, "Block swapping only works with pipeline_stages=1"
        assert "adapter" in config, "Block swapping only works when training LoRA"


SIMPLETUNER_LATER = ("transformers.models.qwen3_vl.modeling_qwen3_vl", "Qwen3VLCausalLMOutputWithPast")
"""A name that a family of SimpleTuner imports, which is not ours, and that transformers has no longer."""


def simpletuner(_path: Path, words: list[str]) -> None:
    """`simpletuner train` up to accelerate's command; the `Trainer` that this starts, with its config, its safety check
    and its family's own; each set of the data file as it is configured; and the size that it gives a sample, which must
    be the one that we read."""
    import diffusers
    from accelerate.commands.launch import launch_command_parser
    from simpletuner.cli import train as command  # type: ignore[import-not-found]

    for schedule in (diffusers.FlowMatchEulerDiscreteScheduler, diffusers.DDPMScheduler):  # weights' files have it
        schedule.from_pretrained = lambda *_a, _own=schedule, **_k: _own()
    started: dict[str, Any] = {}

    def popen(argv: list[str], env: dict[str, str], **_named: Any) -> MagicMock:
        started.update(argv=argv, env=env)
        return MagicMock(wait=lambda: 0, poll=lambda: 0)

    command.subprocess.Popen = popen
    assert command.run_training(extra_args=words) == 0, "simpletuner train ends with an error"
    launch_command_parser().parse_args(started["argv"][2:])
    os.environ.update(started["env"])
    sys.argv = started["argv"][-1:]
    trainer = importlib.import_module("simpletuner.helpers.training.trainer").Trainer(exit_on_error=True)
    _simpletuner_data(trainer)


def _simpletuner_data(trainer: Any) -> None:
    factory = importlib.import_module("simpletuner.helpers.data_backend.factory")
    state = importlib.import_module("simpletuner.helpers.training.state_tracker").StateTracker
    samples = importlib.import_module("simpletuner.helpers.image_manipulation.training_sample")
    sets = json.loads(Path(trainer.config.data_backend_config).read_text(encoding="utf-8"))
    for each in sets:
        if "instance_data_dir" in each:
            Path(each["instance_data_dir"]).mkdir(parents=True, exist_ok=True)
    made = factory.FactoryRegistry(trainer.config, trainer.accelerator, [], [], trainer.model)
    sets = made._inject_i2v_conditioning_configs(made.load_configuration())
    made._prevalidate_backend_ids(sets)
    made._validate_edit_model_conditioning_type(sets)
    trained = {}
    for each in sets:
        if each["dataset_type"] in ("image", "video", "conditioning"):
            made._handle_resolution_conversion(each)
        factory.create_backend_config(each, vars(trainer.config)).validate(vars(trainer.config))
        configured = factory.init_backend_config(each, trainer.config, trainer.accelerator)["config"]
        if each["dataset_type"] in ("image", "video"):
            trained[each["id"]] = configured
            state.set_data_backend_config(each["id"], configured)
    if made._requires_conditioning_dataset() and not any(each.get("conditioning_data") for each in sets):
        raise ValueError("Model requires a conditioning dataset")
    for name, configured in trained.items():
        _same_size(samples.TrainingSample, name, configured, trainer.model)


def _same_size(sample: Any, name: str, configured: dict[str, Any], model: Any) -> None:
    """Samples twice as large, upright where they are cropped, have the size that is read."""
    from planner import dialects
    from planner.dialects.base.dialect import translate
    from planner.dialects.base.script import from_file

    job = translate(*dialects.read_script(from_file(Path("train.sh").resolve()))).job
    wanted = job["width"], job["height"]
    sides = [(2 * wanted[0], 2 * wanted[1])] + ([(2 * wanted[1], 2 * wanted[0])] if configured["crop"] else [])
    for size in sides:
        one = sample(None, name, {"original_size": size}, model=model)
        found = one.calculate_target_size()[0]
        if found != wanted:
            raise ValueError(f"samples of {size} are trained at {found}, read as {wanted}")
    frames = (configured.get("video") or {}).get("num_frames", 1)
    frames = model.adjust_video_frames(frames) if hasattr(model, "adjust_video_frames") else frames
    if frames != (job["frames"] or 1):
        raise ValueError(f"clips are {frames} frames long, read as {job['frames']}")


def accelerate(_path: Path, _words: list[str]) -> None:
    """The config and the command as `accelerate launch` takes them, up to the start of the script."""
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    ClusterConfig.from_yaml_file("accelerate.yaml")
    words = ["--config_file", "accelerate.yaml", "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        HfDeepSpeedConfig(args.deepspeed_config_file)


RUNNERS: dict[str, Callable[[Path, list[str]], None]] = {
    "accelerate": accelerate,
    "ai-toolkit": ai_toolkit,
    "diffusion-pipe": diffusion_pipe,
    "easyanimate": by_function,
    "latentsync": by_yaml,
    "musubi-tuner": by_main,
    "sd-scripts": by_main,
    "simpletuner": simpletuner,
}


def _launcher(launcher: str, launch: dict[str, Any]) -> None:
    """The launcher's own parser, over the flags in front of the script."""
    words = [word for name, value in launch.items() for word in ([name] if value is True else [name, str(value)])]
    if launcher == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        launch_command_parser().parse_args([*words, "script.py"])
    elif launcher == "torchrun":
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([*words, "script.py"])


def child(trainer: str, root: Path) -> None:
    """Reads lines of {folder, script, words, launcher, launch} and adds to each what was said, empty if accepted."""
    os.environ["OWN_PARSERS_TRAINER"] = trainer
    os.environ["HF_HUB_OFFLINE"] = "1"
    import diffusers
    import torch
    import transformers

    if not torch.cuda.is_available():  # asked for in default arguments (musubi-tuner wan/modules/t5.py)
        torch.cuda.current_device = lambda: 0
    # These ask which libraries there are, and stand-ins are none.
    ours = "AutoencoderKL UNet2DConditionModel StableDiffusionPipeline FluxPipeline"
    theirs = "PreTrainedModel CLIPTextModel T5EncoderModel BloomPreTrainedModel"
    for library, names in ((diffusers, ours), (transformers, theirs)):
        for name in names.split():
            with contextlib.suppress(Exception):
                getattr(library, name)
    sys.path[:0] = [str(root), str(root / "src")]
    sys.meta_path.append(StandIn(root))
    answers = sys.stdout
    if trainer == "ai-toolkit":
        with contextlib.suppress(Exception), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            importlib.import_module("toolkit.util.get_model").get_all_models()  # once for all
    if trainer == "simpletuner":
        setattr(importlib.import_module(SIMPLETUNER_LATER[0]), SIMPLETUNER_LATER[1], type(SIMPLETUNER_LATER[1], (), {}))
        os.environ["SIMPLETUNER_LOG_LEVEL"] = "ERROR"
        os.chdir(root)  # it opens a debug.log
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            importlib.import_module("simpletuner.helpers.training.trainer")  # once for all
    for line in sys.stdin:
        asked = json.loads(line)
        if trainer not in ("accelerate", "ai-toolkit", "diffusion-pipe", "easyanimate", "simpletuner"):
            with contextlib.suppress(Exception), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                sys.argv = [asked["script"]]
                loaded(root / asked["script"])  # once for all; what goes wrong is said below
        if (own := os.fork()) == 0:  # a run sets globals that may be set once
            print(json.dumps({**asked, "said": _said(trainer, root, asked)}), file=answers, flush=True)
            os._exit(0)
        os.waitpid(own, 0)


def _said(trainer: str, root: Path, asked: dict[str, Any]) -> str:
    script = root / asked["script"]
    if trainer != "accelerate" and not script.is_file():
        return f"there is no {asked['script']}"
    heard = io.StringIO()
    os.chdir(asked["folder"])
    if trainer == "latentsync":  # started in the repository, with the config put there
        shutil.copytree(asked["folder"], root, dirs_exist_ok=True)
        os.chdir(root)
    sys.argv = [str(script), *asked["words"]]
    try:
        with redirect_stdout(heard), redirect_stderr(heard):
            _launcher(asked["launcher"], asked["launch"])
            RUNNERS.get(trainer, by_parser)(script, asked["words"])
    except Accepted:
        return ""
    except FileNotFoundError as error:  # weights: everything before them was accepted
        return "" if str(error.filename).startswith("models/") or "safetensors" in str(error) else str(error)
    except SystemExit as error:
        return "" if not error.code else " ".join(heard.getvalue().splitlines()[-1:])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"
    return ""


# ---- here


def commands(files: Path, target: str) -> list[dict[str, Any]]:
    """The commands of all exports to a target, as their scripts start them."""
    from planner.dialects.base.script import from_file

    found = []
    for script in sorted((files / target).glob("*/*/*.sh")):
        for program in from_file(script).programs:
            if program.script:
                found.append(
                    {
                        "folder": str(script.parent),
                        "script": program.script,
                        "words": list(program.arguments),
                        "launcher": program.launcher,
                        "launch": program.launch,
                    }
                )
    return found


def tree(mirrors: Path, target: str, folder: Path) -> None:
    """A trainer's repository at its commit, written out."""
    clone, commit = SOURCES[target]
    git = mirrors / clone / "repo" if (mirrors / clone / "repo").is_dir() else mirrors / clone
    names = subprocess.run(
        ["git", "-C", str(git), "ls-tree", "-r", "--name-only", commit], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        if name.endswith((".py", ".yaml", ".yml", ".toml", ".json")):
            shown = subprocess.run(["git", "-C", str(git), "show", f"{commit}:{name}"], capture_output=True)
            if shown.returncode == 0:  # a clone without its largest files lacks some
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(shown.stdout)


def main() -> int:
    """Prints what was accepted by target, and each refusal once; 1 where there is one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mirrors", type=Path)
    parser.add_argument("files", type=Path)
    parser.add_argument("--targets", default=",".join(SOURCES))
    parser.add_argument("--python", default=sys.executable, help="one with the trainer's own libraries")
    options = parser.parse_args()
    wrong: Counter[tuple[str, str, str]] = Counter()
    where: dict[tuple[str, str, str], str] = {}
    print("| target | commit | exports | commands | accepted |\n|---|---|---|---|---|")
    for target in options.targets.split(","):
        asked = commands(options.files.resolve(), target)
        if not asked:
            continue
        with tempfile.TemporaryDirectory() as folder:
            if SOURCES[target][0]:
                tree(options.mirrors, target, Path(folder))
            done = subprocess.run(
                [*shlex.split(options.python), str(Path(__file__).resolve()), "--child", target, folder],
                input="\n".join(map(json.dumps, asked)),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(answers) == len(asked), f"{target}: {len(answers)} answers to {len(asked)}"
        for answer in answers:
            if answer["said"]:
                key = (target, answer["script"], answer["said"])
                wrong[key] += 1
                where.setdefault(key, answer["folder"])
        exports = len({each["folder"] for each in asked})
        accepted = sum(not answer["said"] for answer in answers)
        print(f"| {target} | {SOURCES[target][1]} | {exports} | {len(asked)} | {accepted} |", flush=True)
    for key, count in wrong.most_common():
        print(f"{count} x {' | '.join(key)}  e.g. {where[key]}")
    return int(bool(wrong))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.path[:] = [one for one in sys.path if Path(one or ".").resolve() != Path(__file__).resolve().parent]
        child(sys.argv[2], Path(sys.argv[3]))
    else:
        raise SystemExit(main())
