"""Prints facts about its own process as JSON, and a line on stderr; exit code 7. For `test_preloaded_python`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile

if __name__ == "__main__":
    handlers = {str(number): signal.getsignal(number) for number in signal.valid_signals()}
    facts = {
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "handled signals": sorted(number for number, handler in handlers.items() if callable(handler)),
        "ignored signals": sorted(number for number, handler in handlers.items() if handler is signal.SIG_IGN),
        "input": sys.stdin.read(),
        "leads its session": os.getsid(0) == os.getpid(),
        "modules first": sys.path[0],
        "open files": sorted(number for number in map(int, os.listdir("/proc/self/fd")) if number < 3),
        "temporary files": tempfile.gettempdir(),
        "waiting signals": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    print(json.dumps(facts))
    print("said", file=sys.stderr)
    sys.exit(7)
