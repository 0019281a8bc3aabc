"""Processes of vLLM's engine, each beside its own daemon."""

import ctypes
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

import spectrumkv as skv

MODEL = os.environ.get("SPECTRUMKV_ENGINE_MODEL", "")
PYTHON = os.environ.get("SPECTRUMKV_ENGINE_PYTHON", "")
SERVED = "smol"
_START_S = 1800.0  # importing vLLM alone takes many minutes where others compute


def _end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


class Server:
    """The HTTP of one engine. role: "kv_producer" or "kv_consumer". extra: kv_connector_extra_config. options: of EngineArgs."""

    def __init__(self, role, extra, **options):
        self.role = role
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="skv-engine-"))
        self.ready, self.log_file = self.folder / "ready.json", self.folder / "log"
        self.options = {"model": MODEL, "served_model_name": SERVED, "extra": extra, **options}

    def to_json(self):
        return {"role": self.role, "ready": str(self.ready), "log": str(self.log_file), "options": self.options}

    def log(self):
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-60:]) if self.log_file.exists() else ""

    def request(self, method, path, body=None, timeout_s=600.0):
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
        return self.request("POST", "/v1/completions", body)

    def abort(self, request_id):
        self.request("POST", "/abort", {"request_id": request_id})

    def preempt(self):
        """Takes the blocks of all that runs."""
        self.request("POST", "/preempt", {})

    def stats(self):
        return self.request("GET", "/stats")

    def counts(self):
        """The connector's counter: event -> number."""
        text = self.request("GET", "/metrics")["text"]
        found = re.findall(r'^vllm:spectrumkv_requests_total\{.*event="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        return {event: float(number) for event, number in found}

    def refined_bytes(self):
        """What the connector has applied between steps."""
        text = self.request("GET", "/metrics")["text"]
        found = re.findall(r"^vllm:spectrumkv_refined_bytes_total\{.*\} (\S+)$", text, re.MULTILINE)
        return sum(float(number) for number in found)


class Engines:
    """Starts the servers; a process that only holds them together."""

    def __init__(self, servers):
        self._servers = servers
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="skv-engine-"))
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "GRPC_ENABLE_FORK_SUPPORT": "0", "PYTHONPATH": str(pathlib.Path(skv.__file__).parents[1]),
            # Nothing here is worth a compiler: the sampler would run one at the first request.
            "TORCHDYNAMO_DISABLE": "1",
        }  # fmt: skip
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
        program = pathlib.Path(__file__).with_name("engine_server.py")
        command = ["nice", "-n", "10", PYTHON, program, json.dumps([server.to_json() for server in servers])]
        with open(self.folder / "log", "wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
                                            preexec_fn=_end_with_parent)  # fmt: skip

    def wait_ready(self):
        end = time.monotonic() + _START_S
        for server in self._servers:
            while not server.ready.exists():
                if self.process.poll() is not None or time.monotonic() > end:
                    logs = [(self.folder / "log").read_text()[-3000:], *(one.log() for one in self._servers)]
                    raise RuntimeError("the engines are not ready:\n" + "\n\n".join(logs))
                time.sleep(0.2)
            told = json.loads(server.ready.read_text())
            server.host, server.port = told["host"], told["port"]

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        for folder in (self.folder, *(server.folder for server in self._servers)):
            shutil.rmtree(folder, ignore_errors=True)
