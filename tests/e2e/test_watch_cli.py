"""`vplan watch`: a page for this computer only, which serves the run's own files and nothing else."""

from __future__ import annotations

import functools
import http.client
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import vplan
from tests.planner.launch.run_folders import killed_and_resumed

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(vplan.command(*words), capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watch") / "out"
    (folder.parent / "secret.png").write_bytes(b"secret")
    return killed_and_resumed(folder)


@pytest.fixture(scope="module")
def port(output: Path) -> Iterator[int]:
    words = vplan.command("watch", str(output), "--port", "0")
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in what a shell starts with &
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    assert process.stdout is not None
    match = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
    assert match is not None
    yield int(match[1])
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and stderr.strip() == ""


def get(port: int, path: str, **headers: str) -> tuple[int, bytes, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def test_the_page_follows_the_run(port: int, output: Path) -> None:
    import time

    status, page, _ = get(port, "/")
    assert status == 200 and b"step 100 of 1000" in page
    last = (output / "metrics.jsonl").read_text().splitlines()[-2]
    with (output / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**json.loads(last), "step": 101}) + "\n")
    time.sleep(1.1)  # a page is so old at most
    assert b"step 101 of 1000" in get(port, "/page")[1]


def test_samples_are_served_whole_and_in_parts(port: int) -> None:
    name = "step-00000033-1.png"
    status, whole, headers = get(port, f"/samples/{name}")
    assert (status, whole, headers["Content-Type"]) == (200, b"picture of " + name.encode(), "image/png")
    status, part, headers = get(port, f"/samples/{name}", Range="bytes=3-6")
    assert (status, part, headers["Content-Range"]) == (206, whole[3:7], f"bytes 3-6/{len(whole)}")
    assert get(port, f"/samples/{name}", Range="bytes=9-")[1] == whole[9:]
    assert get(port, f"/samples/{name}", Range="bytes=9999-")[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/samples/", "/samples/../metrics.jsonl", "/metrics.jsonl", "/run/request.json", "/../secret.png",
        "/samples/%2e%2e/%2e%2e/secret.png", "/samples/../../secret.png", "//etc/passwd",
        "/samples/step-00000001-0.png", "/samples/step-00000033-1.png/", "/samples/./step-00000033-1.png",
    ],
)  # fmt: skip
def test_nothing_else_is_served(port: int, path: str) -> None:
    assert get(port, path)[0] == 404


def test_another_sites_name_is_refused(port: int) -> None:
    assert get(port, "/", Host=f"evil.example:{port}")[0] == 403
    assert get(port, "/", Host=f"localhost:{port}")[0] == 200


def test_a_browser_that_hangs_up_is_no_fault(port: int, output: Path) -> None:
    """The end of the server's fixture checks that nothing was printed."""
    name = "step-00000033-1.png"
    whole = (output / "samples" / name).read_bytes()
    (output / "samples" / name).write_bytes(bytes(64 << 20))  # more than sockets buffer
    with socket.create_connection(("127.0.0.1", port)) as hasty:
        hasty.sendall(f"GET /samples/{name} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert hasty.recv(12) == b"HTTP/1.1 200"
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # ends with a reset
    (output / "samples" / name).write_bytes(whole)
    assert get(port, "/")[0] == 200


def test_only_this_computer_is_listened_to(port: int) -> None:
    import psutil

    (listening,) = {
        entry.laddr.ip
        for entry in psutil.net_connections("tcp")
        if entry.status == "LISTEN" and entry.laddr.port == port
    }
    assert listening == "127.0.0.1"


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_the_served_page_without_a_complaint(port: int, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    words = [CHROMIUM, *flags, f"--user-data-dir={tmp_path}", "--dump-dom", f"http://127.0.0.1:{port}/"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert 'class="copy"' in done.stdout and "<title>(lost)" not in done.stdout
    assert [line for line in done.stderr.splitlines() if re.search(r"CONSOLE|Content Security Policy", line)] == []


def test_the_numbers_as_json_and_the_page_as_a_file(output: Path) -> None:
    told = json.loads(run("watch", str(output), "--json").stdout)
    assert told["state"] == "stopped" and told["starts"] == 2 and told["repeated_steps"] == 7
    assert told["phases"]["decode"]["inside"] is False and told["phases"]["train"]["inside"] is True
    done = run("report", str(output))
    assert done.returncode == 0 and (output / "report.html").is_file(), done.stderr
    assert done.stderr == f"wrote {output / 'report.html'}\n"


def test_a_run_does_not_steer_the_terminal(tmp_path: Path) -> None:
    from planner.commands.watch import _summary
    from planner.launch.run_history import RunHistory
    from planner.terminal import console
    from reports.run_data import run_page

    folder = killed_and_resumed(tmp_path)
    (folder / "run" / "request.json").write_text(json.dumps({"plan": {"job": {"model": "wan\x1b[2Jgone"}}}))
    (folder / "run" / "result-00000.json").write_text(json.dumps({"outcome": "nan", "message": "\x1b]0;owned\x07"}))
    history = RunHistory(folder)
    history.update()
    with (terminal := console(width=80)).capture() as shown:
        terminal.print(_summary(run_page(history)))
    text = shown.get()
    assert r"wan\x1b[2Jgone" in text and r"\x1b]0;owned" in text and "\x1b" not in text
    assert "loss 1.0000 (mean of 10 steps)" in text and "outside the predicted range" in text


def test_what_is_no_run_is_refused(tmp_path: Path, port: int, output: Path) -> None:
    for words in (("watch", str(tmp_path)), ("report", str(tmp_path))):
        done = run(*words)
        assert done.returncode == 1 and "is not the output of a run" in done.stderr
    taken = run("watch", str(output), "--port", str(port))
    assert taken.returncode == 2 and f"cannot use port {port}" in taken.stderr
    assert run("report", str(output), "--rows", "x.jsonl").returncode == 2
