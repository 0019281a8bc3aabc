"""A Prometheus of a test's own."""

import json
import pathlib
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request


def available():
    return shutil.which("prometheus") is not None


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Prometheus:
    """Scrapes jobs {name: addresses} every second into `folder`, with the rule files; stop() ends it by its process id."""

    def __init__(self, folder, jobs, rules=()):
        folder = pathlib.Path(folder)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rule) for rule in rules],
            "scrape_configs": [{"job_name": name, "static_configs": [{"targets": list(addresses)}]} for name, addresses in jobs.items()],
        }
        (folder / "prometheus.yaml").write_text(json.dumps(config))  # JSON is YAML
        self.log = folder / "prometheus.log"
        for _ in range(3):  # somebody else may take the port meanwhile
            port = free_port()
            self.url = f"http://127.0.0.1:{port}"
            with open(self.log, "wb") as log:
                self.process = subprocess.Popen(
                    ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb",
                     f"--web.listen-address=127.0.0.1:{port}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # fmt: skip
            if self._ready():
                return
            self.stop()
        raise RuntimeError(f"prometheus did not start:\n{self.log.read_text()[-2000:]}")

    def _ready(self):
        end = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < end:
            try:
                if self.get("/-/ready"):
                    return True
            except OSError:
                time.sleep(0.1)
        return False

    def get(self, path, **parameters):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=20) as answer:
            return answer.read().decode()

    def api(self, path, **parameters):
        return json.loads(self.get(f"/api/v1/{path}", **parameters))["data"]

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
