"""The only entry point of vplan: the console script, `python -m vplan`, worker processes and the Python API.

The packages behind it have common names, and users' repositories have folders called `trainers` or `reports` too. So
those packages are only ever imported through this file, which first makes sure that they are ours. In our own processes
it puts our folder first on the search path for good. A script that says `import vplan` gets answers in its own process,
with its search path left as it was:

    import vplan
    plan = vplan.suggest("wan2.1-t2v-14b", gpu="rtx4090", frames=81)
    print(plan.estimate.verdict, plan.estimate.peak.device_bytes)
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api import CheckedCommand, EstimateAnswer, PlanAnswer
    from planner.foreign.export import Exported

__all__ = ["VplanError", "check", "estimate", "export", "preflight", "read_plan", "report", "suggest"]

HOME = os.path.dirname(os.path.realpath(__file__))
"""The folder this file and our packages lie in: a checkout, or the environment's site-packages."""

PACKAGES = ("planner", "profiles", "trainers", "reports")


class VplanError(ValueError):
    """What a vplan process refused: `message` names the fault, `fix` what to pass instead."""

    def __init__(self, message: str, fix: str = "", exit_code: int = 1) -> None:
        super().__init__(f"{message}; {fix}" if fix else message)
        self.message = message
        self.fix = fix
        self.exit_code = exit_code


def suggest(model: str | None = None, *, trainer: str | None = None, **options: Any) -> PlanAnswer:
    """The best way to train a model on a card, as `vplan suggest` finds it.

    Options are those of the command line, with underscores: `gpu="24GB", frames=81, vae_tiling=True`. The plan has
    `estimate`, `ladder` (the next plans to step down to), `alternatives` and `switches`; `save`, `report` and `export`
    write it. Where nothing fits it is the tightest one, and its verdict `no`. `trainer`: search what that one can
    express, as `--for` does.
    """
    answer: PlanAnswer = _api().suggest(options, _options({"model": model, "for": trainer, **options}))
    return answer


def estimate(model: str | None = None, **options: Any) -> EstimateAnswer:
    """What one way of training needs, as `vplan estimate` says it, also when it does not fit. Options as in `suggest`.

    It has `verdict`, `peak`, `phases`, `breakdown`, `host_ram_bytes` and `step_seconds`; bytes are whole numbers.
    """
    answer: EstimateAnswer = _api().estimate(options, _options({"model": model, **options}))
    return answer


def check(command: str | os.PathLike[str] | Sequence[str], **options: Any) -> CheckedCommand:
    """Whether another trainer's command runs out of memory, and what to change, as `vplan check` says it.

    `command`: a file (script, TOML, YAML, JSON), a command line, or its words; it is read and never run.
    """
    answer: CheckedCommand = _api().check(command, options, _options(options))
    return answer


def read_plan(path: str | os.PathLike[str]) -> PlanAnswer:
    """The plan in a plan.toml, with its estimate and ladder as they were written."""
    answer: PlanAnswer = _api().read_plan(path)
    return answer


def report(plans: PlanAnswer | Sequence[PlanAnswer], path: str | os.PathLike[str]) -> None:
    """Write an HTML report about one plan, or about several side by side."""
    _api().report(plans, path)


def export(
    plan: PlanAnswer, to: str, folder: str | os.PathLike[str], *, nearest: bool = False, force: bool = False
) -> Exported:
    """Write a plan as another trainer's files into a folder; the answer has `files` and `start`, the command to type.

    `nearest`: take the nearest plan that this trainer can express; `force`: overwrite files.
    """
    answer: Exported = _api().export(plan, to, folder, nearest=nearest, force=force)
    return answer


def preflight(plan: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Whether a plan can start on this machine as it is now: what `vplan preflight --json` prints, or a VplanError.

    For the first lines of anybody's training script, so it runs as a process of its own, whatever that script has
    imported. Options are those of the command line:

        import vplan
        vplan.preflight("plan.toml", data="clips", wait="10m")
    """
    return _ask("preflight", None, {"plan": os.fspath(plan), **options})


def command(*arguments: str) -> list[str]:
    """The command that starts vplan as a process of this Python, by path, so that no folder can stand in its way."""
    return [sys.executable, os.path.join(HOME, "vplan.py"), *arguments]


def __getattr__(name: str) -> str:
    """`vplan.__version__`, looked up when it is asked for: our packages may not be the first of their names here."""
    if name != "__version__":
        raise AttributeError(f"module 'vplan' has no attribute {name!r}")
    import importlib.metadata

    return importlib.metadata.version("vplan")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def main(arguments: list[str] | None = None) -> int:
    """Run one command line (by default this process's) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        _put_own_packages_first()
        if arguments[:1] == ["worker"]:
            return _work(arguments[1:])
    except VplanError as error:
        return _refuse(error, as_json="--json" in arguments)
    # A command makes many objects and hardly any garbage: collecting took a third of a replay, and again at the exit.
    gc.set_threshold(200_000)
    # Else the first record makes pydantic read the entry points of every package installed, to look for plugins.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from planner.commands import cli

    for stream in (sys.stdout, sys.stderr):  # a bar that a terminal cannot spell is no reason to die
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    code: int = cli.main(arguments, prog_name="vplan", standalone_mode=False)
    gc.freeze()
    return code


def _api() -> Any:
    """The API's module, imported with our packages in front; the search path is as it was when it returns."""
    found = sys.modules.get("planner.api")
    if found is not None and os.path.dirname(str(found.__file__)) == os.path.join(HOME, "planner"):
        return found
    before = list(sys.path)
    try:
        _put_own_packages_first(("planner", "profiles", "reports"))
        return importlib.import_module("planner.api")
    finally:
        sys.path[:] = before


def _put_own_packages_first(packages: Sequence[str] = PACKAGES) -> None:
    """Make our folder the first place imports look; refuse when one of our packages is someone else's all the same."""
    sys.path[:] = [HOME, *(entry for entry in sys.path if entry != HOME)]
    for name in packages:
        ours = os.path.join(HOME, name, "__init__.py")
        loaded = sys.modules.get(name)
        if loaded is not None:
            found = getattr(loaded, "__file__", None)
        else:
            spec = importlib.util.find_spec(name)
            found = spec.origin if spec else None
        if found is None or os.path.realpath(found) != ours:
            raise VplanError(
                f"the package {name!r} is {found or 'something without a file'}, not vplan's own in {HOME}",
                "reinstall vplan if that file is gone; a script that has imported its own starts vplan as a process: "
                "subprocess.run(vplan.command('suggest', '--json', ...))",
            )


def _work(arguments: list[str]) -> int:
    """`vplan worker NAME ...`: run trainers/NAME.py in this process. For our own processes and for launchers."""
    name = arguments[0] if arguments else ""
    if not name.isidentifier() or not os.path.isfile(os.path.join(HOME, "trainers", f"{name}.py")):
        raise VplanError(f"there is no worker {name!r}", "workers are started by vplan itself; see vplan --help", 2)
    sys.argv = [f"vplan worker {name}", *arguments[1:]]
    return importlib.import_module(f"trainers.{name}").main(arguments[1:]) or 0


def _refuse(error: VplanError, *, as_json: bool) -> int:
    if as_json:
        sys.stdout.write(json.dumps({"schema": 1, "error": {"message": error.message, "fix": error.fix}}) + "\n")
    else:
        text = f"error: {error.message}\nfix: {error.fix}\n"
        # Escapes as text. Not by `planner.terminal`, which may be another's here.
        sys.stderr.write("".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text))
    return error.exit_code


def _ask(verb: str, model: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Run `vplan VERB --json` and return its object; a refusal becomes a VplanError, a crash a RuntimeError."""
    arguments = [verb, *_options({"model": model, **options}), "--json"]
    import subprocess  # only for whoever asks from Python

    done = subprocess.run(command(*arguments), capture_output=True, text=True, encoding="utf-8", errors="replace")
    if not done.stdout.strip():
        raise RuntimeError(f"vplan {verb} ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise VplanError(answer["error"]["message"], answer["error"]["fix"], done.returncode)
    return answer


def _options(options: dict[str, Any]) -> list[str]:
    """Keyword arguments as command-line options: `vae_tiling=False, frames=81` is `--no-vae-tiling --frames=81`."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words.append(f"--{flag}=" + ",".join(map(str, value)))
        else:
            words.append(f"--{flag}={value}")
    return words


if __name__ == "__main__":
    sys.exit(main())
