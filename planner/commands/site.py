"""`vplan site`: a static site that runs the planner in the reader's browser."""

from __future__ import annotations

import functools
import http
import http.server
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner.catalog import user_data
from planner.commands import USAGE
from planner.commands._shared.verb import DONE, Verb, examples, json_option, show
from planner.errors import VplanError, quoted
from planner.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

PORT = 8018
HOST = "127.0.0.1"
MARK = "manifest.json"
"""A folder with this file is a site that we built."""


@click.command(
    cls=Verb,
    epilog=examples("vplan site -o site", "vplan site -o site --serve", "vplan site -o site --force"),
)
@click.option("-o", "--output", metavar="DIR", required=True, help="Folder to write the site to.")
@click.option("--serve", is_flag=True, help="Then show it on a page of this computer alone; Ctrl-C ends it.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=PORT,
    show_default=True,
    metavar="N",
    help="Port of --serve; 0 takes a free one.",
)
@click.option("--force", is_flag=True, help="Build it again where the folder has one.")
@click.option(
    "--downloads", metavar="DIR", help="Where Pyodide and its packages are kept.  [default: vplan's data folder]"
)
@click.option("--address", metavar="URL", default="", help="Where the site will be, for the picture of a shared link.")
@json_option
def command(
    output: str, serve: bool, port: int, force: bool, downloads: str | None, address: str, as_json: bool
) -> int:
    """Build a static site that answers `suggest` and `check` in the reader's browser, with nothing uploaded.

    Any file server can show it, and so can a static Space on Hugging Face. Building it takes Pyodide by npm and its
    packages by pip, each with a pinned hash, and keeps them; the site itself loads nothing from elsewhere.
    """
    folder = Path(output).expanduser().absolute()
    is_site = (folder / MARK).is_file()
    if folder.exists() and not is_site and (not folder.is_dir() or any(folder.iterdir())):
        raise VplanError(f"{quoted(output)} is there, and is no site of vplan's", "choose another folder", USAGE)
    if is_site and not force and not serve:
        raise VplanError(f"{quoted(output)} has a site", "pass --force to build it again, or --serve to show it", USAGE)
    if force or not is_site:
        kept = Path(downloads).expanduser().absolute() if downloads else user_data.folder() / "downloads"
        nbytes = _build(folder, kept, address)
        answer = {"folder": str(folder), "bytes": nbytes}

        def render(console: Console) -> None:
            console.print(f"wrote {folder} ({nbytes / 1e6:.1f} MB)", markup=False, soft_wrap=True)

        show(answer, as_json, render)
    if serve:
        _serve(folder, port)
    return DONE


def _build(folder: Path, downloads: Path, address: str) -> int:
    """Builds the site in a temporary folder, then moves it to its place."""
    import reports.site

    made = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        nbytes = reports.site.build(made, downloads, address)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    except OSError as error:
        raise VplanError(f"cannot write the site: {error.strerror}", "choose another folder") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return nbytes


class _SiteHandler(http.server.SimpleHTTPRequestHandler):
    """Serves the files of a site to this computer only."""

    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}

    def send_head(self) -> object:  # type: ignore[override]  # a file or None, as the base says it
        # DNS rebinding: a foreign site may resolve to this address, but it cannot choose the Host header.
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(http.HTTPStatus.FORBIDDEN)
            return None
        return super().send_head()

    def log_message(self, *_: object) -> None:
        """Logs no requests, so that the terminal shows only the address."""


def _serve(folder: Path, port: int) -> None:
    """Serves a site until the user stops it."""
    handler = functools.partial(_SiteHandler, directory=str(folder))
    try:
        server = http.server.ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        fault = f"cannot use port {port}: {error.strerror}"
        raise VplanError(fault, "pass another --port, or --port 0 for a free one", USAGE) from None
    echo(f"page: http://{HOST}:{server.server_address[1]}/  (Ctrl-C ends it)")
    with server:
        server.serve_forever()
