"""The two daemons and the worker beside each: started, stopped, continued, killed and started again."""

import contextlib
import json
import mmap
import pathlib
import signal
import subprocess
import sys
import threading
import time

import contents
import network
import numpy as np
import refinements
import resources
from real_daemon import RealDaemon

import spectrumkv as skv
from spectrumkv.v1 import admin_service_pb2

PROGRESS_S = 1.0
MAX_DEADLINE_S = 8.0
RETURN_S = 5.0
LEASE_S = 20
_HERE = str(pathlib.Path(__file__).parent)
_KEYS = {
    "transfer__progress_timeout_ms": int(PROGRESS_S * 1000),
    "transfer__max_deadline_ms": int(MAX_DEADLINE_S * 1000),
    "transfer__default_deadline_ms": 5000,
    "peer__connect_timeout_ms": 1000,
    "lease__default_ttl_ms": 1000 * LEASE_S,
    "refine__max_rate_bytes": refinements.RATE_BYTES,
    "refine__cache_bytes": refinements.CACHE_BYTES,
}


class Daemon(RealDaemon):
    """A daemon of one side. `net`: the test's own network, or None for loopback."""

    def __init__(self, side, net, keys):
        self.side, self.net = side, net
        self.starts = 0
        if net is not None:
            self.launcher = net.launcher(side)
            keys = {"peer__listen_address": f"{network.ADDRESSES[side]}:0", **keys}
        super().__init__(**{**_KEYS, **keys})

    def _start(self):
        super()._start()
        self.starts += 1
        self.observer = skv.Client(self.worker, timeout_s=10)

    def scrape(self):
        return network.in_host(self.net, self.side, super().scrape)

    def status(self):
        with self.admin() as admin:
            return admin.GetStatus(admin_service_pb2.GetStatusRequest(), timeout=10)

    def pools(self):
        with self.admin() as admin:
            return list(admin.ListPools(admin_service_pb2.ListPoolsRequest(), timeout=10).pools)

    def has_pools(self, count, timeout_s):
        """Whether so many pools are registered, before timeout_s have passed."""
        end = time.monotonic() + timeout_s
        while len(self.pools()) != count:
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def start(self):
        """Once more after a kill, at the same addresses."""
        self._start()

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.observer.close()
        super().kill()

    def stop(self):
        if self.alive:
            self.signal(signal.SIGCONT)
            self.observer.close()
        return super().stop()


class Worker:
    """A worker process at a daemon, and this test's own look into its pool: cache, memory."""

    def __init__(self, daemon, seed, shared_dir):
        self.daemon, self.shared_dir = daemon, shared_dir
        self.events, self._changed = [], threading.Condition()
        command = [sys.executable, f"{_HERE}/worker.py", daemon.worker, str(shared_dir), str(seed)]
        # stderr: what the client library logs while daemons die under it.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=subprocess.DEVNULL, preexec_fn=network.end_with_parent)  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self.segment = self.wait_for(lambda event: event.get("ready"), 30)["ready"]
        with open(pathlib.Path(shared_dir) / self.segment.lstrip("/"), "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.memory = np.frombuffer(self._map, np.uint8)
        self.cache = contents.group().view(self.memory, 0).view("<u2")

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self.events.append({**json.loads(line), "at": time.monotonic()})
                self._changed.notify_all()
        with self._changed:
            self.events.append({"event": "ended", "at": time.monotonic()})
            self._changed.notify_all()

    def told(self, **wanted):
        """The first event with these values, or None."""
        with self._changed:
            return next((e for e in self.events if all(e.get(k) == v for k, v in wanted.items())), None)

    def wait_for(self, fits, timeout_s):
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for event in self.events:
                    if fits(event):
                        return event
                if not self._changed.wait(end - time.monotonic()) and time.monotonic() >= end:
                    raise AssertionError(f"the worker said nothing of the kind within {timeout_s} s: {self.events[-3:]}")

    def order(self, **order):
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it was killed: its transfers never begin

    @property
    def alive(self):
        return self.process.poll() is None

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        if self.alive:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(BrokenPipeError):  # an order that nobody read
            self.process.stdin.close()
        self.cache = self.memory = None
        path = pathlib.Path(self.shared_dir) / self.segment.lstrip("/")
        path.unlink(missing_ok=True)  # a killed process cannot


class World:
    """Both sides. mend() brings back whoever is missing."""

    def __init__(self, seed, net, *, keys=({}, {}), disk_bytes=0):
        self.seed, self.net = seed, net
        self.daemons, self.workers = [], [None, None]
        for side in range(2):
            self.daemons.append(Daemon(side, net, keys[side]))
            if disk_bytes:
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk_bytes}", "tmpfs", self.shared_dir(side)], check=True)
        self.disk_bytes = disk_bytes
        # (content, policy) to the words that an undisturbed transfer brings: see torture.learn().
        self.references = {}
        # What each daemon held when it had served its first transfers.
        self.base, self.now = [None, None], [None, None]
        self.mend()

    def shared_dir(self, side):
        return self.daemons[side].shared_dir

    def expected(self, transfer):
        """The words of which each cell must arrive as in one: for contents.wrong_words()."""
        return [self.references[transfer.content, policy] for policy in contents.CELLS_OF.get(transfer.policy, (transfer.policy,))]

    def left_over(self, side):
        """What the daemon of this side has not given back."""
        if self.base[side] is None:
            self.base[side] = resources.held(self.daemons[side])
        wrong, self.now[side] = resources.left_over(self.daemons[side], self.base[side])
        return wrong

    def mend(self):
        for side, daemon in enumerate(self.daemons):
            again = not daemon.alive
            if again:
                daemon.start()
            if self.workers[side] is None or not self.workers[side].alive:
                self.replace_worker(side)
            elif again and not daemon.has_pools(1, RETURN_S):  # the worker's pool comes back by itself, in its own time
                self.replace_worker(side)
                # It may have come back in this very moment; then only its lease tells the daemon that its worker is gone.
                daemon.has_pools(1, LEASE_S + RETURN_S)

    def replace_worker(self, side):
        if self.workers[side] is not None:
            self.workers[side].close()
        self.workers[side] = Worker(self.daemons[side], self.seed, self.shared_dir(side))

    def close(self):
        for worker in self.workers:
            if worker is not None:
                worker.close()
        codes = [daemon.stop() for daemon in self.daemons]
        logs = [daemon.log() for daemon in self.daemons]
        for side, daemon in enumerate(self.daemons):
            if self.disk_bytes:
                subprocess.run(["umount", "--lazy", self.shared_dir(side)], check=False)
            daemon.remove()
        assert codes == [0, 0], f"exit codes {codes}\n" + "\n".join(logs)


