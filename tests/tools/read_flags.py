"""Reads the flags of other trainers out of their sources into profiles/trainers/, so that they can be read again.

    python -m tests.tools.read_flags diffsynth path/to/git/of/DiffSynth-Studio

Nothing of a source runs: argparse calls are found in the syntax tree of a file at a commit, from the function that
makes the parser on through the repository's own functions that add to it. What was removed comes from the history.
"""

from __future__ import annotations

import ast
import functools
import json
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.tools.flag_sources import SOURCES, Source

READ_AT = "2026-11-21"
OUT = Path(__file__).parents[2] / "profiles" / "trainers"
KINDS = {"int": "int", "float": "float", "str": "str", "bool": "bool", "Path": "path"}
ARITHMETIC = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.Pow: operator.pow}
UNREADABLE = object()


def git(repository: str, *arguments: str) -> str:
    return subprocess.run(["git", "-C", repository, *arguments], check=True, capture_output=True, text=True).stdout


class Reader:
    """The flags of one repository at one commit."""

    def __init__(self, repository: str, commit: str) -> None:
        self.repository, self.commit = repository, commit
        self.paths = set(git(repository, "ls-tree", "-r", "--name-only", commit).splitlines())
        self.read: set[str] = set()

    @functools.cache  # noqa: B019
    def tree(self, path: str) -> ast.Module:
        return ast.parse(git(self.repository, "show", f"{self.commit}:{path}"))

    @functools.cache  # noqa: B019
    def functions(self, path: str) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in ast.walk(self.tree(path)) if isinstance(node, ast.FunctionDef)}

    @functools.cache  # noqa: B019
    def imported(self, path: str) -> dict[str, tuple[str, str]]:
        """Name in a file -> the file of the repository it comes from, and its name there ("" for the module)."""
        found: dict[str, tuple[str, str]] = {}
        for node in ast.walk(self.tree(path)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if file := self.file(alias.name, path):
                        found[alias.asname or alias.name] = (file, "")
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                for alias in node.names:
                    if alias.name == "*":
                        found.update(self.given_on(self.file(base, path)))
                    elif file := self.file(f"{base}.{alias.name}", path):
                        found[alias.asname or alias.name] = (file, "")
                    elif file := self.file(base, path):
                        found[alias.asname or alias.name] = (file, alias.name)
        return found

    def given_on(self, file: str) -> dict[str, tuple[str, str]]:
        """What `from file import *` brings."""
        if not file:
            return {}
        return {**self.imported(file), **{name: (file, name) for name in self.functions(file)}}

    def file(self, module: str, path: str) -> str:
        """The file of a module as a file of the repository names it; "" when it is none of the repository's."""
        tail = module.strip(".").replace(".", "/")
        near = Path(path).parent
        for start in (near, *near.parents):
            for candidate in (start / f"{tail}.py", start / tail / "__init__.py"):
                if candidate.as_posix() in self.paths:
                    return candidate.as_posix()
        return ""

    def flags(self, path: str, function: str) -> list[dict[str, Any]]:
        """The flags that a function (`` = the whole file) adds to a parser, and those it lets others add."""
        self.read.add(path)
        body: ast.AST = self.functions(path)[function] if function else self.tree(path)
        found: list[dict[str, Any]] = []
        calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
                found += self.flag(call)
                continue
            where = self.target(path, call)
            if where and where != (path, function) and self.adds(*where):
                found += self.flags(*where)
        return found

    def target(self, path: str, call: ast.Call) -> tuple[str, str] | None:
        function = call.func
        if isinstance(function, ast.Name):
            if function.id in self.functions(path):
                return path, function.id
            file, name = self.imported(path).get(function.id, ("", ""))
        elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            file, name = self.imported(path).get(function.value.id, ("", ""))[0], function.attr
        else:
            return None
        while file and name not in self.functions(file):  # given on by a module that imports it itself
            file, name = self.imported(file).get(name, ("", ""))
        return (file, name) if file else None

    @functools.cache  # noqa: B019
    def adds(self, path: str, function: str) -> bool:
        """Whether a function takes or makes a parser (and is not one that parses something else)."""
        node = self.functions(path)[function]
        takes = any("parser" in argument.arg for argument in node.args.args)
        return takes or (node.name.startswith(("setup_parser", "get_parser")))

    def flag(self, call: ast.Call) -> list[dict[str, Any]]:
        names = [constant(argument) for argument in call.args]
        names = [name for name in names if isinstance(name, str) and name.startswith("-")]
        if not names:
            print(f"skipped: {ast.unparse(call)[:90]}", file=sys.stderr)
            return []
        names.sort(key=lambda name: not name.startswith("--"))
        words = {keyword.arg: keyword.value for keyword in call.keywords}
        action = constant(words["action"]) if "action" in words else None
        found: dict[str, Any] = {"name": names[0]}
        if names[1:]:
            found["aliases"] = names[1:]
        if action is UNREADABLE and ast.unparse(words["action"]) == "check_env":
            action = "store_true"  # torchrun's own
        found["type"] = "bool" if str(action).startswith("store_") else kind(words.get("type"))
        if isinstance(action, str):
            found["action"] = action
        elif action is UNREADABLE and "Optional" in ast.unparse(words["action"]):
            found["action"] = "boolean_optional"
        for name in ("nargs", "choices", "default", "required"):
            value = constant(words[name]) if name in words else None
            if value is not None and value is not UNREADABLE:
                found[name] = [one for one in value if one is not None] if isinstance(value, tuple | list) else value
        return [found]


def kind(node: ast.expr | None) -> str:
    if node is None:
        return "str"
    text = ast.unparse(node)
    if text in KINDS:
        return KINDS[text]
    return "bool" if "bool" in text else "int" if "int" in text else "float" if "float" in text else "str"


def constant(node: ast.expr) -> Any:
    """A literal's value; sums and products of literals count as one."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = constant(node.left), constant(node.right)
        if UNREADABLE in (left, right) or isinstance(left, list) or isinstance(right, list):
            return UNREADABLE
        return ARITHMETIC[type(node.op)](left, right)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNREADABLE


LITERAL_KINDS = {"str": "str", "int": "int", "float": "float", "bool": "bool", "dict": "dict"}


def keys(reader: Reader, path: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """The keys a file reads out of dictionaries: `config["a"]`, `config.get("a", 1)`, `config.setdefault("a", 1)`.

    `names`: how a dictionary is called in the file, or ``class X`` whose methods call it ``kwargs``, or ``schema X``
    for a dictionary whose keys are those allowed -> what stands in front of its keys.
    """
    found: dict[str, dict[str, Any]] = {}

    def add(prefix: str, name: Any, kind: str, default: Any = UNREADABLE) -> None:
        if not isinstance(name, str):
            return
        own: dict[str, Any] = {"name": prefix + name, "type": kind}
        if default is not UNREADABLE and default is not None:
            own["default"] = default
        if own["name"] not in found or ("default" in own and "default" not in found[own["name"]]):
            found[own["name"]] = own

    for node in ast.walk(reader.tree(path)):
        if isinstance(node, ast.ClassDef) and f"class {node.name}" in names:
            given = names[f"class {node.name}"]
            for one in ast.walk(node):
                if looked := lookup(one):
                    where, name, default = looked
                    if where == "kwargs":
                        add(given, name, hint(default), default)
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name)
        ):
            for given in names.get(f"schema {node.targets[0].id}", "").split():
                for key, value in zip(node.value.keys, node.value.values, strict=True):
                    text = ast.unparse(value)
                    add(given.removeprefix("."), constant(key) if key else None, LITERAL_KINDS.get(text, "str"))
        elif (looked := lookup(node)) and looked[0] in names:
            add(names[looked[0]], looked[1], hint(looked[2]), looked[2])
    return list(found.values())


def lookup(node: ast.AST) -> tuple[str, Any, Any] | None:
    """Dictionary, key and default of one access."""
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value), constant(node.slice), UNREADABLE
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr in ("get", "setdefault", "pop") and node.args:
        default = constant(node.args[1]) if len(node.args) > 1 else UNREADABLE
        return ast.unparse(called.value), constant(node.args[0]), default
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        return ast.unparse(node.comparators[0]), constant(node.left), UNREADABLE
    return None


def hint(default: Any) -> str:
    """A default is no declaration: a key that is `false` may take a word too."""
    return "dict" if isinstance(default, dict) else "any"


def type_of(value: Any) -> str:
    kinds = {bool: "bool", int: "int", float: "float", str: "str", list: "list", tuple: "list", dict: "dict"}
    return kinds.get(type(value), "any")


def shipped(reader: Reader, path: str) -> list[dict[str, Any]]:
    """Every key of a config file that comes with the trainer, and its value there."""
    import yaml

    def flat(value: Any, name: str) -> list[dict[str, Any]]:
        if isinstance(value, dict):
            return [one for key, inner in value.items() for one in flat(inner, f"{name}.{key}" if name else key)]
        own = {"name": name, "type": type_of(value)}
        return [own if value is None else {**own, "default": value}]

    return flat(yaml.safe_load(git(reader.repository, "show", f"{reader.commit}:{path}")), "")


REMOVED = re.compile(r"^-\s*(?:parser|group|\w+)?\.?(?:add_argument\()?\s*[\"'](--[\w-]+)[\"']", re.MULTILINE)


def gone(reader: Reader, known: set[str], source: Source) -> dict[str, str]:
    """Flags that a file once had and nobody adds now -> date and commit of the last change that took them away."""
    found: dict[str, str] = {}
    log = git(reader.repository, "log", "-p", "-U0", "--no-color", "--date=short", "--format=@@@%h %ad",
              reader.commit, "--", *sorted({*reader.read, *source.history}))  # fmt: skip
    for name, when in source.gone.items():
        if name not in known:
            found[name] = when
    for part in log.split("@@@")[1:]:
        head, _, patch = part.partition("\n")
        commit, date = head.split()[:2]
        for name in REMOVED.findall(patch):
            if name not in known:
                found.setdefault(name, f"{date} ({commit})")
    return found


def record(value: dict[str, Any]) -> str:
    def text(one: Any) -> str:
        if isinstance(one, list):
            return "[" + ", ".join(text(each) for each in one) + "]"
        return json.dumps(one, ensure_ascii=False)

    return "{ " + ", ".join(f"{key} = {text(one)}" for key, one in value.items()) + " }"


def write(source: Source, scripts: list[dict[str, Any]], flags: dict[str, list[dict[str, Any]]]) -> Path:
    """A trainer's file: its scripts, then every different flag once, with the scripts that have it."""
    lines = [f"trainer = {json.dumps(source.trainer)}", f"source = {json.dumps(source.url)}", ""]
    for script in scripts:
        lines += ["[[script]]", *(f"{key} = {json.dumps(value)}" for key, value in script.items()), ""]
    owners: dict[str, list[str]] = {}
    for path, own in flags.items():
        for text in dict.fromkeys(record(flag) for flag in own):
            owners.setdefault(text, []).append(path)
    groups: dict[tuple[str, ...], list[str]] = {}
    for text, paths in owners.items():
        groups.setdefault(tuple(paths), []).append(text)
    for paths, texts in groups.items():
        whole = len(paths) == len(flags)
        named = ['"*"'] if whole else [json.dumps(path) for path in paths]
        lines += ["[[group]]", f"scripts = [{', '.join(named)}]", "flag = ["]
        lines += [f"    {text}," for text in texts]
        lines += ["]", ""]
    out = OUT / f"{source.trainer}.toml"
    out.write_text("\n".join(lines), encoding="utf-8")
    return out


def dashed(flag: dict[str, Any]) -> dict[str, Any]:
    other = "--" + flag["name"][2:].replace("_", "-")
    names = dict.fromkeys([*flag.get("aliases", []), other])
    names.pop(flag["name"], None)
    return {"aliases": list(names)} if names else {}


def main(trainer: str, repository: str) -> None:
    source = SOURCES[trainer]
    readers, scripts, flags = [], [], {}
    for entry in source.scripts:
        commit = git(repository, "rev-parse", "--short=8", entry.commit or source.commit).strip()
        readers.append(reader := Reader(repository, commit))
        if entry.keys:
            own = [flag for path, names in entry.keys for flag in keys(reader, path, names)]
        else:
            own = shipped(reader, entry.path) if entry.format == "yaml" else reader.flags(entry.path, entry.function)
        if source.dashes:
            own = [{**flag, **dashed(flag)} for flag in own]
        flags[entry.path] = {flag["name"]: flag for flag in own}
        flags[entry.path].update({name: {"name": name, "type": "dict"} for name in entry.open})
    live = [flag for entry in source.scripts if not entry.removed for flag in flags[entry.path].values()]
    now = {name for flag in live for name in (flag["name"], *flag.get("aliases", ()))}
    for entry, reader in zip(source.scripts, readers, strict=True):
        history = gone(reader, now | source.never, source) if entry.format == "argparse" and not entry.removed else {}
        for name, when in history.items():
            instead = source.instead.get(name, "")
            flags[entry.path][name] = {"name": name, "type": "str", "nargs": "?", "gone": when + instead}
        script: dict[str, Any] = {"path": entry.path, "commit": source.version or reader.commit, "read_at": READ_AT}
        script.update({"format": entry.format} if entry.format != "argparse" else {})
        script.update({"removed": entry.removed} if entry.removed else {})
        lenient = entry.format == "argparse" and "parse_known_args(" in git(
            reader.repository, "show", f"{reader.commit}:{entry.path}"
        )
        script.update({"lenient": True} if lenient else {})
        script.update({"files": [path for path, _ in entry.keys]} if entry.keys else {})
        scripts.append(script)
        print(entry.path, len(flags[entry.path]), "of them gone:", len(history), file=sys.stderr)
    print(write(source, scripts, {path: list(own.values()) for path, own in flags.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
