"""Real vLLM servers on the CPU, each beside its own daemon."""

import ctypes
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import time

MODEL = os.environ.get("SPECTRUMKV_ENGINE_MODEL", "")
PYTHON = os.environ.get("SPECTRUMKV_ENGINE_PYTHON", "")
SERVED = "smol"
_START_S = 400.0
_STOP_S = 30.0


def _end_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """role: "kv_producer" or "kv_consumer". extra: kv_connector_extra_config beyond the daemon. launcher: words before the
    command."""

    def __init__(self, role, daemon_socket, log, *, extra=None, arguments=(), launcher=(), host="127.0.0.1"):
        self.role, self.host, self.port, self.log_file = role, host, free_port(), pathlib.Path(log)
        transfer = {
            "kv_connector": "SpectrumKVConnector", "kv_connector_module_path": "spectrumkv.vllm", "kv_role": role,
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"daemon": daemon_socket, **(extra or {})},
        }  # fmt: skip
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "GRPC_ENABLE_FORK_SUPPORT": "0",
        }  # fmt: skip
        command = [
            *launcher, "nice", "-n", "5", PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL,
            "--served-model-name", SERVED, "--host", host, "--port", str(self.port), "--dtype", "float32",
            "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager",
            "--kv-transfer-config", json.dumps(transfer), *arguments,
        ]  # fmt: skip
        with open(self.log_file, "wb") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
                                            preexec_fn=_end_with_parent)  # fmt: skip

    @property
    def alive(self):
        return self.process.poll() is None

    def log(self):
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-60:])

    def wait_ready(self):
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if not self.alive:
                raise RuntimeError(f"{self.role} has ended:\n{self.log()}")
            try:
                self.request("GET", "/health", timeout_s=5)
                return self
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"{self.role} is not ready after {_START_S} s:\n{self.log()}")

    def request(self, method, path, body=None, timeout_s=180.0):
        """The parsed answer; raises OSError where there is none, RuntimeError for another status than 200."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{self.role} {path}: {answer.status} {text[:500]}")
        return json.loads(text) if text else {}

    def complete(self, **body):
        return self.request("POST", "/v1/completions", {"model": SERVED, "temperature": 0, **body})

    def stop(self):
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
