"""The one door of vplan: the console script, `python -m vplan`, worker processes and the Python API.

The packages behind it have common names, and users' repositories have folders called `trainers` or `reports` too. So
nothing imports those packages but a process that came in through `main`, which first sees to it that they are ours.
A script that says `import vplan` gets functions that start such a process, whatever the script itself has imported:

    import vplan
    answer = vplan.estimate("wan2.1-t2v-1.3b", gpu="24GB", frames=81, gradient_checkpointing="full")
    print(answer["peak"]["device_bytes"], answer["verdict"])
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import json
import os
import sys
from typing import Any

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


def estimate(model: str | None = None, **options: Any) -> dict[str, Any]:
    """What one way of training needs: the object `vplan estimate --json` prints, also when it does not fit.

    Options are those of the command line, with underscores: `frames=81, gpu="24GB", vae_tiling=True`.
    """
    return _ask("estimate", model, options)


def suggest(model: str | None = None, **options: Any) -> dict[str, Any]:
    """The best way to train on a card: the object `vplan suggest --json` prints. Options as for `estimate`."""
    return _ask("suggest", model, options)


def preflight(plan: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """Whether a plan can start on this machine as it is now: what `vplan preflight --json` prints, or a VplanError.

    For the first lines of anybody's training script; options are those of the command line:

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


def _put_own_packages_first() -> None:
    """Make our folder the first place imports look; refuse when one of our packages is someone else's all the same."""
    sys.path[:] = [HOME, *(entry for entry in sys.path if entry != HOME)]
    for name in PACKAGES:
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
                "reinstall vplan if that file is gone; in a script that has its own, start vplan as a process: "
                "`import vplan; vplan.estimate(...)`, or the command line",
            )


def _work(arguments: list[str]) -> int:
    """`vplan worker NAME ...`: run trainers/NAME.py in this process. For our own processes and for launchers."""
    name = arguments[0] if arguments else ""
    if not name.isidentifier() or not os.path.isfile(os.path.join(HOME, "trainers", f"{name}.py")):
        raise VplanError(f"there is no worker {name!r}", "workers are started by vplan itself; see vplan --help", 2)
    sys.argv = [f"vplan worker {name}", *arguments[1:]]
    return importlib.import_module(f"trainers.{name}").main(arguments[1:]) or 0


def _refuse(error: VplanError, *, as_json: bool) -> int:
    if as_json and error.exit_code != 2:
        sys.stdout.write(json.dumps({"error": {"message": error.message, "fix": error.fix}}) + "\n")
    else:
        text = (
            f"error: {error.message}\nfix: {error.fix}\n"  # escapes as text: `planner.terminal` may be another's here
        )
        sys.stderr.write("".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text))
    return error.exit_code


def _ask(verb: str, model: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Run `vplan VERB --json` and return its object; a refusal becomes a VplanError, a crash a RuntimeError."""
    arguments = [verb, *_options({"model": model, **options}), "--json"]
    import subprocess  # only for whoever asks from Python

    done = subprocess.run(command(*arguments), capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode == 2:
        message, _, fix = done.stderr.strip().rpartition("\nfix: ")
        raise VplanError(message.rpartition("error: ")[2] or fix, fix if message else "", 2)
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
