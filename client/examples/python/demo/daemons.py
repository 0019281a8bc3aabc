"""Two spectrumkvd processes on this machine, each with a folder of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from typing import Any

_START_S = 30.0
_STOP_S = 15.0
_PR_SET_PDEATHSIG = 1

_CONFIG = """\
# A daemon of scripts/demo: everything on this machine, the peer link without TLS.
worker:
  socket: {folder}/worker.sock
peer:
  listen_address: 127.0.0.1:0
  security: plain
admin:
  socket: {folder}/admin.sock
health:
  listen_address: 127.0.0.1:0
metrics:
  listen_address: 127.0.0.1:0
memory:
  shared_dir: {folder}/shared
"""


class DaemonDied(Exception):
    """spectrumkvd ended, or did not come up; the message has the end of its log."""


@dataclass
class Addresses:
    """Where a daemon listens, as it says in its ready file."""

    worker_socket: str
    admin_socket: str
    peer: str
    health: str
    metrics: str


class Daemon:
    """A spectrumkvd. Starts it and waits until it is ready; stop() ends it, by its process id."""

    def __init__(self, program: pathlib.Path, folder: pathlib.Path, *, outlive: bool) -> None:
        """outlive: keep running when this process ends."""
        self.folder = folder
        self.log = folder / "log"
        folder.mkdir(mode=0o700)
        (folder / "shared").mkdir(mode=0o700)
        self._ready = folder / "ready.json"
        config = folder / "spectrumkvd.yaml"
        config.write_text(_CONFIG.format(folder=folder))
        self._command = [program, "--config", config, "--ready-file", self._ready]
        self._outlive = outlive
        self._start()

    def restart(self) -> None:
        """Starts it again, in the same folder, after stop() or a crash. TCP ports are new ones."""
        self.stop()
        self._start()

    def _start(self) -> None:
        self._ready.unlink(missing_ok=True)
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=None if self._outlive else _end_with_parent,
            )  # fmt: skip
        try:
            told = self._await_ready()
            self.addresses = Addresses(**{name: told[name] for name in Addresses.__annotations__})
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _await_ready(self) -> dict[str, Any]:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise DaemonDied(f"spectrumkvd ended with {self._process.returncode} at its start:\n{self._log_tail()}")
            # Written in place or moved there: take it once it is whole.
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                told: dict[str, Any] = json.loads(self._ready.read_text())
                return told
            time.sleep(0.02)
        raise DaemonDied(f"spectrumkvd is not ready after {_START_S:.0f} s:\n{self._log_tail()}")

    def explain(self) -> str:
        status = self._process.poll()
        alive = "is running" if status is None else f"HAS ENDED with {status}"
        return f"-- the {self.folder.name} daemon {alive}; the end of its log:\n{self._log_tail()}"

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics: 'name{labels}' -> value."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self.addresses.metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def stop(self) -> int:
        """Asks it to end, waits, insists. Returns its exit status. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        return self._process.returncode


def _end_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Pair:
    """The daemon beside the prefill worker and the one beside the decode worker; a context manager.

    keep: leave them, and their folder, when the context ends without an error.
    """

    def __init__(self, program: pathlib.Path, *, keep: bool) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="spectrumkv-demo-"))
        self._keep = keep
        self._daemons: list[Daemon] = []
        try:
            for name in ("prefill", "decode"):
                self._daemons.append(Daemon(program, self.folder / name, outlive=keep))
        except BaseException:
            self._end()
            raise
        self.prefill, self.decode = self._daemons

    def _end(self) -> list[int]:
        codes = [daemon.stop() for daemon in self._daemons]
        shutil.rmtree(self.folder, ignore_errors=True)
        return codes

    def stop_command(self) -> str:
        return f"kill {' '.join(str(daemon.pid) for daemon in self._daemons)}; rm -rf {self.folder}"

    def __enter__(self) -> Pair:
        return self

    def explain(self) -> str:
        """Which daemons have died, and the end of every log: for when something else went wrong."""
        return "\n".join(daemon.explain() for daemon in self._daemons)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None or not self._keep:
            codes = self._end()
            if kind is None and any(codes):
                raise DaemonDied(f"the daemons ended with {codes} when they were asked to")


def find_program(given: str | None, root: pathlib.Path) -> pathlib.Path:
    """The spectrumkvd to run: the one given, else the one scripts/demo has built."""
    path = pathlib.Path(given) if given else root / "build-demo" / "server" / "spectrumkvd"
    if not os.access(path, os.X_OK):
        raise SystemExit(f"demo: there is no program {path}; scripts/demo builds it")
    return path.resolve()
