"""Commands that start another one: `srun`, containers, environments, `bash -c`; what they start is what is read.

Behind which words a wrapper's own options end is known only where each of them is: an option that is not listed here
may have a value, and what is started is then not guessed. The options are those of the commands' own manuals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import VplanError, quoted

SHELLS = frozenset({"bash", "sh", "zsh", "dash"})
_COMMAND = re.compile(r"-[a-zA-Z]*c[a-zA-Z]*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


ENTRY = "--entrypoint"
"""Of a container: the program that is given what stands behind the image."""


class UnclearError(VplanError):
    """Raised for a wrapper with an option of which it is not known whether it has a value."""

    def __init__(self, wrapper: str, option: str) -> None:
        fault = f"what {quoted(wrapper)} starts is not clear: whether its {quoted(option)} has a value is not known"
        super().__init__(fault, f"leave {wrapper} and its options out, and pass the command behind them")


@dataclass(frozen=True)
class Wrapper:
    """A command that starts the one behind its options and so many words of its own."""

    valued: frozenset[str] = frozenset()
    """options whose value is the next word, where no `=` or, of one letter, no text stands behind them"""
    switches: frozenset[str] = frozenset()
    """options without a value, or with one behind `=` alone"""
    words: int = 0
    """what stands before the command: an image, a number of seconds"""
    variables: frozenset[str] = frozenset()
    """those of `valued` that set a variable for the command: `NAME=VALUE`"""
    assigns: bool = False
    """whether `NAME=VALUE` may stand before the command"""


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SRUN = Wrapper(
    _set(
        "-A --account -B --extra-node-info -b --begin -C --constraint -c --cpus-per-task -D --chdir -d "
        "--dependency -e --error -G --gpus --gres -i --input -J --job-name --jobid -L --licenses -m "
        "--distribution --mem --mem-per-cpu --mem-per-gpu --mpi -N --nodes -n --ntasks --ntasks-per-node "
        "--ntasks-per-gpu -o --output -p --partition -q --qos -r --relative -t --time -T --threads -w --nodelist "
        "-W --wait -x --exclude --gpus-per-node --gpus-per-task --container-image --container-mounts "
        "--container-name --container-save --container-workdir --container-env --reservation --signal "
        "--threads-per-core --network --prolog --epilog --export --gpu-freq --cpu-freq --cpu-bind --gpu-bind "
        "--mem-bind --hint --accel-bind --comment --het-group --propagate"
    ),
    _set(
        "-l --label -u --unbuffered -v --verbose -Q --quiet -s --oversubscribe -K --kill-on-bad-exit --exclusive "
        "--exact --overlap --pty -E --preserve-env -O --overcommit -k --no-kill -H --hold -I --immediate "
        "--spread-job --container-remap-root --no-container-remap-root --container-mount-home "
        "--no-container-mount-home --container-writable --container-readonly --contiguous -X --disable-status"
    ),
)
_APPTAINER = Wrapper(
    _set(
        "-B --bind -H --home -W --workdir -S --scratch -o --overlay --env --env-file --pwd --cwd --mount "
        "--network --network-args --security --app --hostname --dns --no-mount --fusemount --add-caps --drop-caps "
        "--memory --cpus --cpuset-cpus --pem-path --apply-cgroups"
    ),
    _set(
        "--nv --nvccli --rocm -e --cleanenv -c --contain -C --containall -w --writable --writable-tmpfs --no-home "
        "-f --fakeroot -i --ipc -p --pid -n --net -u --userns --uts --no-privs --keep-privs --compat --no-compat "
        "--no-init --unsquash --disable-cache --no-umask --no-eval --no-https --underlay"
    ),
    words=1,
    variables=_set("--env"),
)
_EXEC = Wrapper(
    _set("-e --env --env-file -u --user -w --workdir --detach-keys"),
    _set("-d --detach -i --interactive -t --tty --privileged"),
    words=1,
    variables=_set("-e --env"),
)
_DOCKER = Wrapper(
    _EXEC.valued
    | _set(
        "--entrypoint --gpus -v --volume --mount --name --shm-size --ipc --network --net -p --publish --runtime "
        "--ulimit --device --cap-add --cap-drop --security-opt -h --hostname -m --memory --memory-swap --cpus "
        "--cpuset-cpus -c --cpu-shares --platform --pull --restart -l --label --log-driver --log-opt --add-host "
        "--userns --pid --tmpfs --volumes-from --group-add --dns --cgroupns --stop-timeout --stop-signal "
        "--cidfile --expose --link --oom-score-adj --sysctl --pids-limit -a --attach --ip --mac-address "
        "--network-alias --uts --annotation --device-cgroup-rule"
    ),
    _EXEC.switches | _set("--rm --init --read-only -P --publish-all -q --quiet --no-healthcheck --oom-kill-disable"),
    words=1,
    variables=_EXEC.variables,
)
_COMPOSE = Wrapper(
    _EXEC.valued | _set("--entrypoint -v --volume --name -p --publish -l --label --cap-add --cap-drop --pull"),
    _EXEC.switches | _set("--rm -T --no-TTY --build --no-deps --service-ports -P --quiet-pull --use-aliases"),
    words=1,
    variables=_EXEC.variables,
)
_CONDA = Wrapper(
    _set("-n --name -p --prefix --cwd"),
    _set("-v --verbose --no-capture-output --live-stream --dev --debug-wrapper-scripts"),
)
_UV = Wrapper(
    _set(
        "-p --python --extra --no-extra --group --no-group --only-group --with --with-editable "
        "--with-requirements --directory --project --package --env-file --index --default-index --index-url "
        "--extra-index-url --cache-dir --config-file --color --link-mode --index-strategy --prerelease "
        "--resolution"
    ),
    _set(
        "--no-sync --frozen --locked --isolated --all-extras --all-groups --active --no-project --no-dev --dev "
        "--only-dev -q --quiet -v --verbose --offline --exact --no-env-file --no-cache -n --refresh --no-editable "
        "-U --upgrade --all-packages --no-config --native-tls --reinstall"
    ),
)
WRAPPERS: dict[tuple[str, ...], Wrapper] = {
    ("srun",): _SRUN,
    ("apptainer", "exec"): _APPTAINER,
    ("singularity", "exec"): _APPTAINER,
    ("docker", "run"): _DOCKER,
    ("docker", "exec"): _EXEC,
    ("docker", "compose", "run"): _COMPOSE,
    ("docker", "compose", "exec"): _COMPOSE,
    ("nvidia-docker", "run"): _DOCKER,
    ("podman", "run"): _DOCKER,
    ("podman", "exec"): _EXEC,
    ("conda", "run"): _CONDA,
    ("mamba", "run"): _CONDA,
    ("micromamba", "run"): _CONDA,
    ("uv", "run"): _UV,
    ("poetry", "run"): Wrapper(),
    ("pipenv", "run"): Wrapper(),
    ("pdm", "run"): Wrapper(),
    ("nohup",): Wrapper(),
    ("time",): Wrapper(frozenset(), _set("-p -v")),
    ("exec",): Wrapper(),
    ("command",): Wrapper(),
    ("setsid",): Wrapper(frozenset(), _set("-w --wait -f --fork -c --ctty")),
    ("env",): Wrapper(_set("-u --unset -C --chdir"), _set("-i --ignore-environment -"), assigns=True),
    ("sudo",): Wrapper(_set("-u --user -g --group"), _set("-E --preserve-env -H -n -b"), assigns=True),
    ("stdbuf",): Wrapper(_set("-i --input -o --output -e --error")),
    ("timeout",): Wrapper(_set("-k --kill-after -s --signal"), _set("--foreground --preserve-status -v --verbose"), 1),
    ("nice",): Wrapper(_set("-n --adjustment")),
    ("ionice",): Wrapper(_set("-c --class -n --classdata"), _set("-t --ignore")),
    ("numactl",): Wrapper(
        _set("-N --cpunodebind -m --membind -C --physcpubind -i --interleave -p --preferred"),
        _set("-l --localalloc -a --all -b --balancing"),
    ),
    ("taskset",): Wrapper(frozenset(), _set("-c --cpu-list -a --all-tasks"), 1),
}
"""The first words of a command -> how its options are read."""


def unwrapped(words: Sequence[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The words of the command that a command starts, and its environment; those given where it starts none. Raises an
    `UnclearError`."""
    rest, environment = list(words), dict(environment)
    while rest:
        if assignment := ASSIGNMENT.fullmatch(rest[0]):
            environment[assignment[1]] = assignment[2]
            rest = rest[1:]
            continue
        name = rest[0].rpartition("/")[2]
        known = next((key for key in WRAPPERS if (name, *rest[1 : len(key)]) == key), None)
        if known is None:
            break
        rest = _behind(" ".join(known), WRAPPERS[known], rest[len(known) :], environment)
    return rest, environment


def inner_command(words: Sequence[str]) -> str | None:
    """The text that `bash -c TEXT` and its like run; None for anything else."""
    if not words or words[0].rpartition("/")[2] not in SHELLS:
        return None
    at = 1
    while at < len(words) - 1 and words[at].startswith(("-", "+")):
        if _COMMAND.fullmatch(words[at]):
            return words[at + 1]
        at += 2 if words[at].endswith("o") and not words[at].startswith("--") else 1  # -o pipefail
    return None


def _behind(name: str, wrapper: Wrapper, words: list[str], environment: dict[str, str]) -> list[str]:
    """The words behind a wrapper's own, whose variables are set in ``environment``."""
    at, own, entry = 0, wrapper.words, ""
    while at < len(words):
        word = words[at]
        if word == "--":
            at += 1
            break
        if not word.startswith("-") and (own == 0 or (wrapper.assigns and ASSIGNMENT.fullmatch(word))):
            break
        if not word.startswith("-"):
            at, own = at + 1, own - 1
            if own == 0:
                break
            continue
        option, value, taken = _option(name, wrapper, word, words[at + 1 : at + 2])
        if option in wrapper.variables and (assignment := ASSIGNMENT.fullmatch(value)):
            environment[assignment[1]] = assignment[2]
        entry = value if option == ENTRY else entry
        at += taken
    return [*([entry] if entry else []), *words[at:]]


def _option(name: str, wrapper: Wrapper, word: str, behind: list[str]) -> tuple[str, str, int]:
    """An option, its value and how many words both are. Raises an `UnclearError` for one that is not listed."""
    option, equals, value = word.partition("=")
    if equals and option in wrapper.valued | wrapper.switches:
        return option, value, 1
    letters = [f"-{letter}" for letter in word[1:]]  # -it
    if word in wrapper.switches or wrapper.switches.issuperset(letters):
        return word, "", 1
    if word in wrapper.valued:
        return word, "".join(behind), 2
    if word[:2] in wrapper.valued and not word.startswith("--"):  # -n8
        return word[:2], word[2:], 1
    raise UnclearError(name, word)
