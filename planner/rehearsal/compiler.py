"""Compiles the libraries of the virtual GPU for one torch, once, into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from planner.errors import VplanError
from planner.rehearsal.interpreter import Interpreter
from planner.rehearsal.symbols import Wanted, defined_in, library_of, stem, wanted_by_all

SOURCES = Path(__file__).parent / "virtual_gpu"

DRIVER, MONITOR = "libcuda.so.1", "libnvidia-ml.so.1"
"""sonames that do not depend on the version of CUDA"""

OLDEST_CUDA, NEWEST_CUDA = 12, 13
WITHOUT_TORCH = "13.0"

_LIBRARY_SOURCES: Mapping[str, tuple[str, ...]] = {
    "libcuda": ("card.c", "holders.c", "memory.c", "file_mappings.c", "driver.c"),
    "libcudart": ("runtime.c",),
    "libcublas": ("math_libraries.c", "CUBLAS"),
    "libcublasLt": ("math_libraries.c", "CUBLASLT"),
    "libcusparse": ("math_libraries.c", "CUSPARSE"),
    "libcusolver": ("math_libraries.c", "CUSOLVER"),
    "libcudnn": ("cudnn.c",),
    "libnccl": ("nccl.c",),
    "libnvrtc": ("nvrtc.c",),
    "libnvidia-ml": ("nvml.c",),
}
"""Library to its sources, with a macro behind them where one source makes several. Others have nothing but stubs."""

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O1", "-w", "-fPIC", "-fvisibility=hidden")
_DONE = "built"
_SECONDS = 300.0


@dataclass(frozen=True)
class _Build:
    """What every compilation of one build shares."""

    compiler: tuple[str, ...]
    folder: Path
    macros: tuple[str, ...]
    wanted: Wanted


def find_compiler() -> tuple[str, ...]:
    """The C compiler's command: `$CC`, else `cc`, `gcc` or `clang`. Raises VplanError where there is none."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for words in [chosen] if chosen else [[name] for name in _COMPILERS]:
        if path := shutil.which(words[0]):
            return (path, *words[1:])
    fix = "install one (Debian, Ubuntu: apt install gcc libc6-dev; Fedora: dnf install gcc), or name it in CC"
    raise VplanError("no C compiler found: the virtual GPU is compiled once for your torch", fix)


def cache_folder() -> Path:
    """Where compiled libraries are kept, a folder for each torch and compiler."""
    import platformdirs  # slow to import

    return Path(platformdirs.user_cache_dir("vplan", appauthor=False)) / "virtual_gpu"


def libraries_for(
    interpreter: Interpreter, cache: Path | None = None, say: Callable[[str], None] = lambda line: None
) -> Path:
    """The folder with the libraries that this Python's torch needs: compiled now, which `say` is told, or before.

    Raises VplanError without a C compiler, and for a torch without CUDA or with one that is not known.
    """
    cuda = _check_cuda(interpreter)
    compiler = find_compiler()
    parts = interpreter.libraries()
    macros = _macros(interpreter, cuda)
    folder = (cache or cache_folder()) / _key(compiler, macros, parts)
    if not (folder / _DONE).exists():
        say(
            f"compiling the virtual GPU for torch {interpreter.torch} (once)"
            if interpreter.torch
            else "compiling the virtual GPU (once)"
        )
        wanted = wanted_by_all(parts, int(cuda.partition(".")[0]))
        wanted.libraries |= {DRIVER, MONITOR, *_sonames(wanted, cuda)}
        _build(_Build(compiler, folder, macros, wanted))
    return folder


def _check_cuda(interpreter: Interpreter) -> str:
    """The version of CUDA to stand in for."""
    if interpreter.torch is None:
        return WITHOUT_TORCH
    if interpreter.cuda is None:
        fix = "install the CUDA wheel there (pip install torch, on Linux); it needs no GPU to be rehearsed"
        raise VplanError(f"torch {interpreter.torch} of {interpreter.path} is built without CUDA", fix)
    major = int(interpreter.cuda.partition(".")[0])
    if not OLDEST_CUDA <= major <= NEWEST_CUDA:
        fix = f"install a torch for CUDA {OLDEST_CUDA} or {NEWEST_CUDA}"
        raise VplanError(f"torch {interpreter.torch} is built for CUDA {interpreter.cuda}, which is not known", fix)
    return interpreter.cuda


def _macros(interpreter: Interpreter, cuda: str) -> tuple[str, ...]:
    """Versions that the libraries report, and what torch's kernels were compiled for.

    torch refuses a cuDNN that is older than the one it was built with.
    """
    major, minor = map(int, cuda.split(".")[:2])
    macros = [f"CUDA_VERSION={major * 1000 + minor * 10}"]
    for package, name in (("nvidia-cudnn", "CUDNN_RELEASE"), ("nvidia-nccl", "NCCL_RELEASE")):
        release = interpreter.required_release(package)
        if release and len(release) >= 3:
            macros.append(f"{name}={release[0] * 10000 + release[1] * 100 + release[2]}")
    if architectures := interpreter.architectures():
        macros.append(f"ARCHITECTURES={','.join(map(str, architectures))}")
    return tuple(macros)


def _sonames(libraries: Wanted, cuda: str) -> set[str]:
    """Libraries that are opened by name, which no file lists as needed."""
    stems = set(map(stem, libraries.libraries))
    major = cuda.partition(".")[0]
    return {f"{name}.so.{major}" for name in ("libcudart", "libnvrtc") if name not in stems}


def _key(compiler: tuple[str, ...], macros: Iterable[str], parts: Iterable[Path]) -> str:
    """The name of the folder: another compiler, another torch or other sources of ours give another one."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(repr((compiler, tuple(macros), _FLAGS)).encode())
    for path in (Path(compiler[0]).resolve(), *parts):
        facts = path.stat()
        digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.hexdigest()[:24]


def _build(build: _Build) -> None:
    """Compile into a folder beside the final one and rename it: two builds at once end in one whole folder."""
    build.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build.folder.parent, prefix=".build-") as place:
        folder = Path(place) / "libraries"
        folder.mkdir()
        temporary = _Build(build.compiler, folder, build.macros, build.wanted)
        objects = Path(place)
        driver = _compile_library(temporary, DRIVER, objects, ())  # the others are linked against it
        others = sorted(build.wanted.libraries - {DRIVER})
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda soname: _compile_library(temporary, soname, objects, (str(driver),)), others))
        (folder / _DONE).touch()
        try:
            folder.rename(build.folder)
        except OSError:
            if not (build.folder / _DONE).exists():  # else another build was faster
                raise


def _compile_library(build: _Build, soname: str, objects: Path, links: tuple[str, ...]) -> Path:
    library = stem(soname)
    files, defined = [], set()
    for source, macro in _sources(library):
        compiled = objects / f"{library}-{Path(source).stem}.o"
        macros = [f"-D{name}" for name in (*build.macros, *([macro] if macro else []))]
        _run([*build.compiler, *_FLAGS, *macros, "-c", str(SOURCES / source), "-o", str(compiled)])
        defined |= defined_in(compiled)
        files.append(compiled)
    names = {name: version for name, version in build.wanted.names.items() if library_of(name) == library}
    stubs = objects / f"{library}-stubs.c"
    stubs.write_text(stub_source(name for name in names if name not in defined), encoding="utf-8")
    script = objects / f"{library}.map"
    text = version_script(names)
    script.write_text(text, encoding="utf-8")
    output = build.folder / soname
    shared = ["-shared", f"-Wl,-soname,{soname}", "-Wl,-z,nodelete", "-Wl,-rpath,$ORIGIN"]
    versions = [f"-Wl,--version-script={script}"] if text else []
    linked = [*map(str, files), str(stubs), *links, "-lpthread", "-ldl"]
    _run([*build.compiler, *_FLAGS, *shared, *versions, "-o", str(output), *linked])
    return output


def _sources(library: str) -> list[tuple[str, str]]:
    """The C files of a library, each with the macro that it is compiled under."""
    words = _LIBRARY_SOURCES.get(library, ())
    macro = next((word for word in words if not word.endswith(".c")), "")
    return [(word, macro) for word in words if word.endswith(".c")]


def stub_source(names: Iterable[str]) -> str:
    """C for functions that answer success (0, and no pointer) to everything."""
    opening = '#define STUB(name) __attribute__((visibility("default"))) long name(void) { return 0; }\n'
    return opening + "".join(f"STUB({name})\n" for name in sorted(names))


def version_script(names: Mapping[str, str]) -> str:
    """The linker's script that gives functions the symbol versions which callers ask for; empty where none has one.

    Most libraries have one version for everything, and then it holds for what nobody listed too.
    """
    versions = sorted({version for version in names.values() if version})
    parts = []
    for number, version in enumerate(versions):
        own = sorted(name for name, asked in names.items() if asked == version)
        globs = ["*"] if number == 0 else own
        parts.append(f"{version} {{ global: {' '.join(f'{name};' for name in globs)} }};\n")
    return "".join(parts)


def _run(command: list[str]) -> None:
    """Run the compiler, or raise a VplanError with its first complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise VplanError(f"the C compiler {command[0]} does not run: {error}", "name another one in CC", 4) from None
    if done.returncode:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        fix = "check that it compiles C (libc's headers are a package of their own), or name another one in CC"
        raise VplanError(f"the C compiler {command[0]} failed: {complaint}", fix, 4)


def preload(folder: Path) -> list[Path]:
    """The libraries to load before any other, the driver first."""
    libraries = sorted(path for path in folder.iterdir() if ".so" in path.name)
    return sorted(libraries, key=lambda path: path.name != DRIVER)
