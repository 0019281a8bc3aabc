"""A spectrumkvd process for one test session: plain peer link, free ports, a folder of its own."""

import contextlib
import ctypes
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request

import grpc

import spectrumkv as skv
from spectrumkv.errors import error_from_rpc
from spectrumkv.v1 import admin_service_pb2_grpc

PROGRAM = os.environ.get("SPECTRUMKVD", "")
_START_S = 60.0
_STOP_S = 30.0
# What a sanitizer keeps of a daemon's freed memory: 256 MiB of quarantine, the red zones and what describes them.
SANITIZER_KIB = 640 << 10 if os.environ.get("SPECTRUMKV_SANITIZED") else 0


def _end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


class RealDaemon:
    """keys: configuration over the test's defaults, "peer.streams" -> "4". stop() ends it by its process id."""

    # Words before the command: a program that becomes the daemon.
    launcher = ()

    def __init__(self, **keys):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="skv-"))
        self.shared_dir = self.folder / "shared"
        self.shared_dir.mkdir()
        self.keys = {
            "worker.socket": f"{self.folder}/worker.sock",
            "admin.socket": f"{self.folder}/admin.sock",
            "peer.security": "plain",
            "peer.listen_address": "127.0.0.1:0",
            "health.listen_address": "127.0.0.1:0",
            "metrics.listen_address": "127.0.0.1:0",
            "memory.shared_dir": str(self.shared_dir),
            "memory.send_slots": "8",
            "memory.receive_slots": "8",
            "codec.threads": "2",
            **{name.replace("__", "."): str(value) for name, value in keys.items()},
        }
        if "worker.tcp_address" in self.keys and "worker.tcp_token_file" not in self.keys:
            (self.folder / "token").write_text("a-token-of-this-test\n")
            self.keys["worker.tcp_token_file"] = f"{self.folder}/token"
        self._start()

    def _start(self):
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        flags = [part for name, value in self.keys.items() for part in ("--set", f"{name}={value}")]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*self.launcher, PROGRAM, "--ready-file", ready, *flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_end_with_parent,
            )  # fmt: skip
        end = time.monotonic() + _START_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"spectrumkvd is not ready ({self.process.poll()}):\n{self.log()}")
            time.sleep(0.01)
        told = json.loads(ready.read_text())
        self.worker, self.admin_socket = told["worker_socket"], told["admin_socket"]
        self.peer, self.metrics_address, self.epoch = told["peer"], told["metrics"], int(told["epoch"])
        self.worker_tcp, self.health = told["worker_tcp"], told["health"]
        # The same ports after a restart, as an operator's configuration has them.
        self.keys["peer.listen_address"] = self.peer

    def log(self):
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-40:])

    @property
    def alive(self):
        return self.process.poll() is None

    def client(self, **options):
        return skv.Client(self.worker, **options)

    @contextlib.contextmanager
    def admin(self):
        with grpc.insecure_channel(f"unix:{self.admin_socket}") as channel:
            yield admin_service_pb2_grpc.AdminServiceStub(channel)

    def scrape(self):
        """The text of /metrics."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self.metrics_address}/metrics", timeout=20) as answer:
            return answer.read().decode()

    def metrics(self):
        """'name{labels}' -> value of every sample."""
        lines = (line for line in self.scrape().splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def errors(self, code=""):
        """Sum of errors_total over stages, of one code or of all."""
        wanted = re.compile(rf'spectrumkv_errors_total\{{.*code="{code.lower() or ".*"}"', re.IGNORECASE)
        return sum(value for name, value in self.metrics().items() if wanted.match(name))

    def kill(self):
        self.process.kill()
        self.process.wait()

    def restart(self):
        """A crash, and a new process at the same addresses."""
        self.kill()
        self._start()

    def stop(self):
        """Asks it to end and insists. The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def remove(self):
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def running(**keys):
    """A daemon for the length of a with block; keys as peer__streams=4."""
    daemon = RealDaemon(**keys)
    try:
        yield daemon
    finally:
        daemon.remove()


@contextlib.contextmanager
def refused(code, reason, **metadata):
    """The block must raise a SpectrumKVError with this code, reason and, among others, these metadata."""
    try:
        yield
    except skv.SpectrumKVError as error:
        assert (error.code, error.reason) == (code, reason), str(error)
        for key, value in metadata.items():
            assert error.metadata.get(key) == value, str(error)
    except grpc.RpcError as raw:
        error = error_from_rpc(raw)
        assert (error.code, error.reason) == (code, reason), str(error)
        for key, value in metadata.items():
            assert error.metadata.get(key) == value, str(error)
    else:
        raise AssertionError(f"was not refused with {code} {reason}")
