"""Processes of vLLM's engine, each beside its own daemon."""

import ctypes
import http.client
import itertools
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

import spectrumkv as skv

MODEL = os.environ.get("SPECTRUMKV_ENGINE_MODEL", "")
PYTHON = os.environ.get("SPECTRUMKV_ENGINE_PYTHON", "")
SERVED = "smol"
_START_S = 900.0  # importing vLLM alone takes minutes where others compute
_names = itertools.count(1)


def _end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


class Server:
    """role: "kv_producer" or "kv_consumer". extra: kv_connector_extra_config beyond the daemon. launcher: words before the
    command. options: of vLLM's EngineArgs, and host."""

    def __init__(self, role, daemon_socket, *, extra=None, launcher=(), **options):
        self.role = role
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="skv-engine-"))
        options = {"model": MODEL, "served_model_name": SERVED, "extra": {"daemon": daemon_socket, **(extra or {})}, **options}
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "GRPC_ENABLE_FORK_SUPPORT": "0",
            "PYTHONPATH": str(pathlib.Path(skv.__file__).parents[1]),
            # Nothing here is worth a compiler: the sampler would run one at the first request.
            "TORCHDYNAMO_DISABLE": "1",
        }  # fmt: skip
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
        program = pathlib.Path(__file__).with_name("engine_server.py")
        command = [*launcher, "nice", "-n", "10", PYTHON, program, role, self.folder / "ready.json", json.dumps(options)]
        with open(self.folder / "log", "wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
                                            preexec_fn=_end_with_parent)  # fmt: skip

    @property
    def alive(self):
        return self.process.poll() is None

    def log(self):
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-60:])

    def wait_ready(self):
        end = time.monotonic() + _START_S
        ready = self.folder / "ready.json"
        while not ready.exists():
            if not self.alive or time.monotonic() > end:
                raise RuntimeError(f"{self.role} is not ready:\n{self.log()}")
            time.sleep(0.2)
        told = json.loads(ready.read_text())
        self.host, self.port = told["host"], told["port"]
        return self

    def request(self, method, path, body=None, timeout_s=300.0):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{self.role} {path}: {answer.status} {text[:500]}")
        return json.loads(text)

    def complete(self, **body):
        return self.request("POST", "/v1/completions", {"request_id": f"{self.role}-{next(_names)}", **body})

    def abort(self, request_id):
        self.request("POST", "/abort", {"request_id": request_id})

    def stats(self):
        return self.request("GET", "/stats")

    def stop(self):
        if self.alive:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
