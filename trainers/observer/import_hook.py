"""Calls a function when a module has been imported, by whomever and whenever."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class ImportHook(importlib.abc.MetaPathFinder):
    """Stands first among the finders, and lets the others find: it only wraps what they found."""

    def __init__(self) -> None:
        self._calls: dict[str, Callable[[ModuleType], None]] = {}
        self._searching: set[str] = set()

    def install(self) -> None:
        """Watch imports from here on."""
        sys.meta_path.insert(0, self)

    def after(self, name: str, call: Callable[[ModuleType], None]) -> None:
        """`call` gets the module `name` as soon as its code has run; at once if it has."""
        module = sys.modules.get(name)
        if module is not None:
            call(module)
        else:
            self._calls[name] = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the other finders say, with its loader wrapped; None for modules that nobody waits for."""
        if fullname not in self._calls or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader, fullname)
        return spec

    def _wrap(self, loader: importlib.abc.Loader, name: str) -> None:
        run = loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            call = self._calls.pop(name, None)
            if call is not None:
                call(module)

        loader.exec_module = run_and_call  # type: ignore[method-assign]  # of this one loader, not of its class
