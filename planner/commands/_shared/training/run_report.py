"""The page of a run, rewritten while the run continues, and served to a browser on this computer."""

from __future__ import annotations

import http.server
import re
import sys
import threading
import time
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import reports
from planner.errors import VplanError
from planner.launch.launch import SAMPLES
from planner.launch.run_history import RunHistory
from planner.terminal import echo

WAIT_SECONDS = 10.0
SHARE = 50
"""Writing pages takes at most this fraction (1/50) of the time."""

FRESH_SECONDS = 1.0
"""Longest age of a served page."""

CHUNK = 2**18
HOST = "127.0.0.1"
TYPES = {".png": "image/png", ".mp4": "video/mp4"}
RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")


class ReportWriter:
    """Writes a run's page while the run continues. If it cannot be written, the run continues and a warning is printed
    once."""

    def __init__(self, output: Path) -> None:
        self._history = RunHistory(output)
        self._next = time.monotonic() + WAIT_SECONDS
        self._stopped = False

    def tick(self) -> None:
        """Writes the page if it is due."""
        if time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Writes the page in its current state."""
        if self._stopped:
            return
        began = time.monotonic()
        try:
            self._history.update()
            reports.write_run(self._history)
        except (VplanError, OSError) as error:
            self._stopped = True
            reason = error.message if isinstance(error, VplanError) else f"{error.filename}: {error.strerror}"
            echo(f"warning: no more report of the run: {reason}", err=True)
        ended = time.monotonic()
        self._next = ended + max(WAIT_SECONDS, SHARE * (ended - began))


class RunServer(http.server.ThreadingHTTPServer):
    """Serves one run's page and samples on the loopback interface, and nothing else."""

    daemon_threads = True

    def __init__(self, output: Path, port: int) -> None:
        """Raises an OSError if the port is in use."""
        self.output = output
        self._lock = threading.Lock()
        self._history = RunHistory(output)
        self._page, self._made = b"", 0.0
        super().__init__((HOST, port), partial(_Handler))

    @property
    def url(self) -> str:
        """The URL of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores connections that browsers close, as they do when seeking in a video."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # a socket and its address

    def page(self) -> bytes:
        """The page in its current state."""
        with self._lock:
            if time.monotonic() - self._made > FRESH_SECONDS:
                self._history.update()
                self._page = reports.run_html(self._history).encode()
                self._made = time.monotonic()
            return self._page

    def sample(self, path: str) -> Path | None:
        """The file of a sample that the run has listed; None for every other path. Paths are compared with the existing
        ones, never built from what a client sent."""
        with self._lock:
            return next((file for file in self._history.sample_files() if f"/{SAMPLES}/{file.name}" == path), None)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: RunServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "vplan", ""
    timeout = 30

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, *, head: bool) -> None:
        # DNS rebinding: a foreign site may resolve to this address, but it cannot choose the Host header.
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        path = urlsplit(self.path).path
        if path in ("/", "/page"):
            try:
                page = self.server.page()
            except VplanError as error:
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=error.message)
                return
            self._headers(HTTPStatus.OK, "text/html; charset=utf-8", len(page))
            if not head:
                self.wfile.write(page)
        elif (sample := self.server.sample(path)) is not None:
            self._send_file(sample, head=head)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_file(self, path: Path, *, head: bool) -> None:
        """Sends a file or the requested range of it: Safari plays videos only with range requests."""
        try:
            file = path.open("rb")
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            size = file.seek(0, 2)
            first, last, status = 0, size - 1, HTTPStatus.OK
            wanted = RANGE.fullmatch(self.headers.get("Range", ""))
            if wanted and int(wanted[1]) < size:
                first, status = int(wanted[1]), HTTPStatus.PARTIAL_CONTENT
                last = min(int(wanted[2]), last) if wanted[2] else last
            parts = {"Accept-Ranges": "bytes"}
            if status == HTTPStatus.PARTIAL_CONTENT:
                parts["Content-Range"] = f"bytes {first}-{last}/{size}"
            self._headers(status, TYPES[path.suffix], max(0, last - first + 1), parts)
            if not head:
                file.seek(first)
                self._copy(file, last - first + 1)

    def _copy(self, file: BinaryIO, count: int) -> None:
        while count > 0 and (chunk := file.read(min(CHUNK, count))):
            self.wfile.write(chunk)
            count -= len(chunk)

    def _headers(self, status: HTTPStatus, kind: str, length: int, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        values = {"Content-Type": kind, "Content-Length": str(length), "Cache-Control": "no-store"}
        values |= {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
        for name, value in {**values, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Logs no requests: the terminal shows the run."""
