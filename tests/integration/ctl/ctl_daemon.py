"""A spectrumkvd with a folder and ports of its own, and spectrumkvctl pointed at it; neither needs a Python package."""

import json
import os
import signal
import subprocess
import time


class Daemon:
    """keys: configuration over the test's defaults. launcher: words before the command, which become the daemon."""

    def __init__(self, program, ctl, folder, keys=None, launcher=(), env=None, wrap_ctl=()):
        os.makedirs(folder, mode=0o700)
        self.program_ctl, self.folder, self.wrap_ctl = ctl, folder, list(wrap_ctl)
        ready = os.path.join(folder, "ready.json")
        self.log_path = os.path.join(folder, "log")
        keys = {
            "worker.socket": f"{folder}/worker.sock", "admin.socket": f"{folder}/admin.sock", "peer.security": "plain",
            "peer.listen_address": "127.0.0.1:0", "health.listen_address": "127.0.0.1:0",
            "metrics.listen_address": "127.0.0.1:0", "memory.shared_dir": folder, "memory.send_slots": "4",
            "memory.receive_slots": "4", **(keys or {}),
        }
        flags = [flag for key, value in keys.items() for flag in ("--set", f"{key}={value}")]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen([*launcher, program, "--ready-file", ready, *flags], stdin=subprocess.DEVNULL,
                                            stdout=log, stderr=log, env={**os.environ, **(env or {})})
        deadline = time.monotonic() + 60
        while not os.path.exists(ready):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"spectrumkvd did not start:\n{self.log()}")
            time.sleep(0.02)
        self.status = self.json("status")
        self.peer = self.status["peer_address"]

    def log(self):
        with open(self.log_path, encoding="utf-8", errors="replace") as log:
            return log.read()[-4000:]

    def command(self, *words):
        return [*self.wrap_ctl, self.program_ctl, *words, "--admin-socket", f"{self.folder}/admin.sock", "--worker-socket",
                f"{self.folder}/worker.sock"]

    def ctl(self, *words):
        """(exit code, stdout, stderr)"""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout, done.stderr

    def json(self, *words):
        code, out, err = self.ctl(*words, "--json")
        if code != 0:
            raise AssertionError(f"spectrumkvctl {' '.join(words)}: exit {code}\n{out}{err}\n{self.log()}")
        return json.loads(out)

    def doctor(self, *words):
        """(exit code, {(check, subject): finding}); doctor names each but once."""
        code, out, err = self.ctl("doctor", *words, "--json")
        findings = json.loads(out)["findings"]
        told = {(f["check"], f["subject"]): f for f in findings}
        assert len(told) == len(findings) and not err, (out, err)
        return code, told

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode
