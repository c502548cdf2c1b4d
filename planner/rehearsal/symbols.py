"""What shared libraries ask of CUDA's: read from their own ELF files, never loaded."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

PREFIXES = (
    ("libcublasLt", "cublasLt"),
    ("libcublas", "cublas"),
    ("libcudnn", "cudnn"),
    ("libcusparseLt", "cusparseLt"),
    ("libcusparse", "cusparse"),
    ("libcusolver", "cusolver"),
    ("libcufft", "cufft"),
    ("libcurand", "curand"),
    ("libcufile", "cuFile"),
    ("libcupti", "cupti"),
    ("libcudart", "cuda"),
    ("libcudart", "__cuda"),
    ("libnccl", "nccl"),
    ("libnvshmem_host", "nvshmem"),
    ("libnvrtc", "nvrtc"),
    ("libnvJitLink", "nvJitLink"),
    ("libnvToolsExt", "nvtx"),
    ("libcuda", "cu"),
)
"""Library to how its functions' names begin. The first that fits counts, so the longer ones stand first."""

_SYMBOL = struct.Struct("<IBBHQQ")
"""Elf64_Sym: name, information, other, section, value, size (System V ABI, "Symbol Table")."""
_UNDEFINED = 0


@dataclass
class Wanted:
    """What some libraries ask for."""

    libraries: set[str] = field(default_factory=set)
    """sonames of CUDA's libraries: `libcudart.so.13`"""
    names: dict[str, str] = field(default_factory=dict)
    """function to its symbol version, which is empty where it has none"""

    def add(self, other: Wanted) -> None:
        """Takes in what another library asks for; a version counts before none."""
        self.libraries |= other.libraries
        for name, version in other.names.items():
            self.names[name] = self.names.get(name) or version

    @property
    def cuda_major(self) -> int | None:
        """The major version of the runtime library that is asked for; None where none is."""
        majors = [name.rpartition(".")[2] for name in self.libraries if stem(name) == "libcudart"]
        return int(majors[0]) if majors and majors[0].isdigit() else None


def stem(soname: str) -> str:
    """`libcusparseLt` of `libcusparseLt.so.0`; `libcudart` of `libcudart-9335f6a2.so.12`, a copy by auditwheel."""
    return re.sub(r"-[0-9a-f]{8}$", "", soname.partition(".so")[0])


def library_of(name: str) -> str | None:
    """The stem of the CUDA library that has a function; None for a function of anybody else's."""
    for library, prefix in PREFIXES:
        if name.startswith(prefix):
            # `cu` alone begins many names: the driver's go on with a capital (cuMemAlloc).
            return library if prefix != "cu" or name[2:3].isupper() else None
    return None


def wanted_by(path: Path) -> Wanted:
    """What one file asks of CUDA's libraries: nothing where it is no 64-bit ELF library, or damaged."""
    try:
        with path.open("rb") as file:
            if file.read(5) != b"\x7fELF\x02":
                return Wanted()
            file.seek(0)
            return _read(ELFFile(file))
    except (ELFError, OSError, struct.error, UnicodeDecodeError, IndexError):
        return Wanted()


def wanted_by_all(paths: Iterable[Path], cuda_major: int | None) -> Wanted:
    """What these files ask for together, without those that were built for another CUDA than `cuda_major`.

    bitsandbytes ships a library for every CUDA and loads the one that torch's needs.
    """
    together = Wanted()
    for path in paths:
        wanted = wanted_by(path)
        if cuda_major is None or wanted.cuda_major in (None, cuda_major):
            together.add(wanted)
    return together


def _read(elf: ELFFile) -> Wanted:
    dynamic = elf.get_section_by_name(".dynamic")
    if not isinstance(dynamic, DynamicSection):
        return Wanted()
    needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    wanted = Wanted({soname for soname in needed if stem(soname) in dict(PREFIXES)})
    for name, version in _undefined(elf):
        if library_of(name):
            wanted.names[name] = version
    return wanted


def _undefined(elf: ELFFile) -> Iterator[tuple[str, str]]:
    """Names that a library leaves to others, with their versions.

    Unpacked here: a large library has a hundred thousand symbols, which take pyelftools seconds one by one.
    """
    symbols, strings = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".dynstr")
    if symbols is None or strings is None:
        return
    text = strings.data()
    numbers = _version_numbers(elf)
    for index, (name_at, _info, _other, section, _value, _size) in enumerate(_SYMBOL.iter_unpack(symbols.data())):
        if section == _UNDEFINED and name_at:
            name = text[name_at : text.index(b"\0", name_at)].decode()
            yield name, numbers.get(index, "")


def _version_numbers(elf: ELFFile) -> dict[int, str]:
    """Index of a symbol to the version that it needs (`.gnu.version` has the number, `.gnu.version_r` its name)."""
    table, needs = elf.get_section_by_name(".gnu.version"), elf.get_section_by_name(".gnu.version_r")
    if table is None or not isinstance(needs, GNUVerNeedSection):
        return {}
    named = {item["vna_other"]: item.name for _file, items in needs.iter_versions() for item in items}
    data = table.data()
    numbers = struct.unpack(f"<{len(data) // 2}H", data)
    return {index: named[number] for index, number in enumerate(numbers) if number in named}


def defined_in(path: Path) -> set[str]:
    """The global functions of an object file that the compiler has just written."""
    with path.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".symtab")
        return {
            symbol.name
            for symbol in symbols.iter_symbols()
            if symbol["st_info"]["bind"] == "STB_GLOBAL" and symbol["st_shndx"] != "SHN_UNDEF"
        }
