"""Builds the static site that plans in the reader's browser: Pyodide, its packages, vplan, and each model's tapes.

What is downloaded is pinned here and in files/requirements.txt, each with its hash, and kept in a folder for the next
build. The site itself loads nothing from anywhere else.
"""

from __future__ import annotations

import hashlib
import html
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import planner
import profiles
from planner import dialects
from planner.catalog import card_lookup, lookup
from planner.catalog.components import COMPONENTS
from planner.catalog.profiles import ModelProfile
from planner.errors import VplanError, quoted
from planner.file_writing import write_file
from planner.foreign.export import SLURM, export_targets
from planner.parallel import progress_bar, spread
from planner.tape.packed_json import as_text, gzipped
from planner.tape.packs import read_recording, stored

FILES = Path(__file__).with_name("files")
REQUIREMENTS = FILES / "requirements.txt"
PAGE = ("index.html", "style.css", "page.js", "worker.js")
PREVIEW = "preview.png"
"""What a forum or a chat shows of a link: 1200 x 630, an answer as the page gave it."""

PYODIDE = "pyodide-314.0.7.tgz"
"""As `npm pack` names it. Its Python is 3.14, its platform pyemscripten_2026_0: what the requirements are built for."""

PYODIDE_SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
PLATFORMS = ("pyemscripten_2026_0_wasm32", "manylinux2014_x86_64")

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self' 'wasm-unsafe-eval'",
        "worker-src 'self' blob:",
        "connect-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
)
"""The page's Content-Security-Policy. The worker inherits it, so that nothing typed can be sent anywhere."""

SPACE = "---\ntitle: vplan\nsdk: static\npinned: false\nlicense: apache-2.0\n---\n\nBuilt by `vplan site`.\n"
"""The README that a static Space on Hugging Face needs."""

LEFT_OUT = ("rehearsals", "tapes", "grids")
"""Folders of `profiles` that no answer of the page reads, or that come in packs."""

_DATE = (1980, 1, 1, 0, 0, 0)
"""Of every file in an archive, so that the same sources make the same site."""


def build(folder: Path, downloads: Path, address: str = "") -> int:
    """Writes the site into a folder and returns its bytes.

    ``downloads``: where Pyodide and the packages are kept. ``address``: as for `page_file`. Raises a VplanError where
    something cannot be downloaded or is not what was pinned.
    """
    models = [lookup.model(name) for name in profiles.model_names()]
    with progress_bar("site: Pyodide, packages, bytecode", 3) as done:
        pyodide = done(_pyodide(downloads))
        archives = done({"libraries": _libraries(_wheels(downloads)), "vplan": _sources()})
        for name, content in pyodide.items():
            _put(folder / "pyodide" / name, content)
        compiled = done(_compiled(archives, folder / "pyodide"))
    for name in PAGE:
        _put(folder / name, page_file(name, address).encode())
    _put(folder / PREVIEW, (FILES / PREVIEW).read_bytes())
    names = [model.name for model in models]
    packs = zip(names, spread(_packer, (), names, "site: tapes of each model"), strict=True)
    manifest = {
        "version": planner.__version__,
        "files": {name: _add(folder, name, _zip(files, packed=True)) for name, files in compiled.items()},
        "packs": {name: _add(folder, f"packs/{name}", pack) for name, pack in packs},
        **_choices(models),
    }
    _put(folder / "manifest.json", json.dumps(manifest, separators=(",", ":")).encode())
    _put(folder / "README.md", SPACE.encode())
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def page_file(name: str, address: str = "") -> str:
    """The text of one of `PAGE`. ``address``: where the site will be, by which a preview's picture has to be named."""
    if address and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", address):
        raise VplanError(f"{quoted(address)} is no address of a site", "pass one, as https://example.org/vplan/")
    base = f"{address.rstrip('/')}/" if address else ""
    text = (FILES / name).read_text(encoding="utf-8")
    return text.replace("{{policy}}", POLICY).replace("{{address}}", html.escape(base))


def _choices(models: Iterable[ModelProfile]) -> dict[str, Any]:
    """What the form offers: models with their shapes, cards, trainers."""
    offered = [
        {
            "name": model.name,
            "title": model.title,
            "video": model.kind == "video",
            "frames": model.shape.default_frames,
            "step": model.shape.frame_step,
            "resolutions": [f"{height}x{width}" for height, width in model.shape.resolutions],
        }
        for model in models
    ]
    trainers = [{"name": name, "title": dialects.dialect(name).title} for name in export_targets() if name != SLURM]
    cards = [*(group.name for group in card_lookup.gpu_classes()), *card_lookup.gpu_names()]
    return {"models": offered, "gpus": cards, "trainers": trainers}


def _pyodide(downloads: Path) -> dict[str, bytes]:
    """The files of Pyodide that the page loads, from its npm package."""
    downloads.mkdir(parents=True, exist_ok=True)
    archive = downloads / PYODIDE
    if not archive.is_file():
        name, _, version = PYODIDE.removesuffix(".tgz").rpartition("-")
        _run(["npm", "pack", "--silent", f"{name}@{version}"], downloads, "install npm (it comes with Node.js)")
    content = archive.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != PYODIDE_SHA256:
        raise VplanError(f"{quoted(str(archive))} is not Pyodide as it was pinned: sha256 {found}", "delete it")
    found_files = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for name in PYODIDE_FILES:
            member = tar.extractfile(f"package/{name}")
            assert member is not None, f"{PYODIDE} has no {name}"
            found_files[name] = member.read()
    return found_files


def _wheels(downloads: Path) -> list[Path]:
    """The wheels of the requirements, in the order of their names; pip compares their hashes, also of those kept."""
    into = downloads / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    pip += ["--no-deps", "--only-binary=:all:", "--implementation=cp", "--python-version=3.14", "--abi=cp314"]
    pip += ["--abi=none", *(f"--platform={name}" for name in PLATFORMS), "--dest", str(into), "-r", str(REQUIREMENTS)]
    pinned = [line.split("==") for line in REQUIREMENTS.read_text().splitlines() if "==" in line]
    expected = [f"{name.replace('-', '_')}-{rest.split()[0]}-*.whl" for name, rest in pinned]
    if not all(any(into.glob(pattern)) for pattern in expected):
        _run(pip, downloads, "see what pip says, and whether it reaches its index")
    found = [next(into.glob(pattern)) for pattern in expected]
    hashes = REQUIREMENTS.read_text()
    for wheel in found:
        if hashlib.sha256(wheel.read_bytes()).hexdigest() not in hashes:
            raise VplanError(f"{quoted(str(wheel))} is not as it was pinned", "delete it")
    return found


def _run(command: list[str], folder: Path, fix: str) -> None:
    if shutil.which(command[0]) is None:
        raise VplanError(f"{command[0]} is not installed: the site's Python comes by it", fix)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, encoding="utf-8", errors="replace")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise VplanError(f"{' '.join(command[:4])} failed: {last[0]}", fix)


def _libraries(wheels: Iterable[Path]) -> dict[str, bytes]:
    """What the wheels install, without parts that are compiled for another platform."""
    found = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith(("-linux-gnu.so", "/")):
                    found[name] = archive.read(name)
    return found


def _compiled(archives: Mapping[str, Mapping[str, bytes]], pyodide: Path) -> dict[str, dict[str, bytes]]:
    """Archives with bytecode instead of sources: compiling took a sixth of the CPU time of a first answer. Node.js runs
    the very Python that will import it."""
    sources = {
        f"{archive}/{name}": content
        for archive, files in archives.items()
        for name, content in files.items()
        if name.endswith(".py")
    }
    with tempfile.TemporaryDirectory() as made:
        before, behind = Path(made, "sources.zip"), Path(made, "compiled.zip")
        before.write_bytes(_zip(sources, packed=False))
        _run(
            ["node", str(FILES / "compile.mjs"), str(pyodide), str(before), str(behind)], Path(made), "install Node.js"
        )
        with zipfile.ZipFile(behind) as found:
            modules = {name: found.read(name) for name in found.namelist()}
    return {
        archive: {
            **{name: content for name, content in files.items() if not name.endswith(".py")},
            **{
                name.removeprefix(f"{archive}/"): made
                for name, made in modules.items()
                if name.startswith(f"{archive}/")
            },
        }
        for archive, files in archives.items()
    }


def _sources() -> dict[str, bytes]:
    """vplan without its trainers, and of `profiles` all but the tapes."""
    home = profiles.FOLDER.parent
    paths = [home / "vplan.py", *(path for name in ("planner", "profiles") for path in (home / name).rglob("*"))]
    paths += (home / "reports").glob("*.py")
    kept = (".py", ".toml", ".jsonl", ".json", ".gz")
    out = {profiles.FOLDER / name for name in LEFT_OUT}
    return {
        path.relative_to(home).as_posix(): path.read_bytes()
        for path in paths
        if path.is_file() and path.suffix in kept and not out & set(path.parents)
    }


def _packer() -> Callable[[str], bytes]:
    """Makes the archive of the tapes of a model, by name: in worker processes, as it takes two minutes on one core."""
    return lambda name: _zip(_tapes(lookup.model(name)), packed=False)


def _tapes(model: ModelProfile) -> dict[str, bytes]:
    """The tapes that answers about a model read, as files: its own, and those of its text encoders and its VAE. A
    browser's Python has no xz."""
    home = profiles.FOLDER.parent
    parts = {*(encoder.folder for encoder in model.text_encoders), model.vae.folder}
    folders = [profiles.TAPES / model.name, *(profiles.TAPES / COMPONENTS / part for part in parts)]
    paths = [path for folder in folders for path in stored(folder)]
    return {path.relative_to(home).as_posix(): gzipped(as_text(read_recording(path)), level=6) for path in paths}


def _zip(files: Mapping[str, bytes], *, packed: bool) -> bytes:
    """An archive of files; the same files make the same bytes."""
    stream = io.BytesIO()
    how = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", how, compresslevel=9) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _DATE), files[name], how)
    return stream.getvalue()


def _add(folder: Path, name: str, content: bytes) -> str:
    """Writes an archive under a name that its content decides, so that a browser never mixes two builds."""
    path = f"{name}-{hashlib.sha256(content).hexdigest()[:12]}.zip"
    _put(folder / path, content)
    return path


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, content)
