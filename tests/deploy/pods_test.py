#!/usr/bin/env python3
"""Two real pods of the shipped manifests move KV over mutual TLS; a daemon is killed, the other drained; nothing is lost.

Played by podman (pods.py says what it cannot do), each pod with an address of its own. The worker is root, the sidecar
65532 without any right.
"""

import pathlib
import shutil
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integration/python")]
import containers

try:
    from pods import Pods, certificates, dial_without_certificate, until
except ImportError as error:
    containers.skip(f"{error.name} is not installed; scripts/install-deps brings it")
from authority import Ca

WANTED = 6  # committed requests before and after each event; half of them raw, half coded


class PodsTest(unittest.TestCase):
    """One life of two pods; the tests are its chapters, in the order of their names."""

    @classmethod
    def setUpClass(cls):
        cls.podman = containers.prepare()
        cls.podman.build_product()
        cls.podman.build_worker()
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="skv-pods-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.pods = Pods(cls.podman, cls.folder, certificates(Ca(cls.folder), cls.folder / "tls"))
        cls.addClassCleanup(cls.pods.remove)
        cls.pods.play("prefill")
        cls.pods.play("decode", DEMO_PREFILL=f"{cls.pods.address('prefill')}:8000")

    def setUp(self):
        self.addCleanup(self.tell_logs)

    def tell_logs(self):
        if self._outcome.result.failures or self._outcome.result.errors:
            print("\n".join(self.pods.logs()))

    def committed(self):
        return self.pods.told("decode", "committed")

    def more(self, count=WANTED):
        """Waits for so many further requests."""
        before = len(self.committed())
        until(lambda: len(self.committed()) >= before + count, 90, lambda: f"only {len(self.committed()) - before} of {count}")

    def test_1_kv_moves_over_mutual_tls(self):
        for role in ("prefill", "decode"):
            until(lambda role=role: self.pods.serving(role, "readiness"))
            self.assertEqual(self.pods.status(role)["peer_security"], "mtls")
        self.more()
        first = self.committed()[:WANTED]
        raw, coded = [e for e in first if e["request"] % 2 == 0], [e for e in first if e["request"] % 2]
        self.assertTrue(all(e["wire_bytes"] > e["kv_bytes"] for e in raw))
        self.assertTrue(all(e["wire_bytes"] <= 0.3 * e["kv_bytes"] for e in coded))
        for role, side in (("prefill", "sender"), ("decode", "receiver")):
            metrics = self.pods.metrics(role)
            done = metrics[f'spectrumkv_transfers_total{{role="{side}",outcome="committed"}}']
            self.assertGreaterEqual(done, WANTED)
            self.assertGreater(metrics["spectrumkv_certificate_expiry_timestamp_seconds"], time.time())
        print(f"{len(first)} requests of {first[0]['kv_bytes'] / 1e6:.1f} MB between two pods, all words right")

    def test_2_who_is_who(self):
        """Different users share memory and socket by their group; the worker cannot reach what is the daemon's alone."""
        self.assertEqual(self.pods.execute("decode", "worker", "id", "-u").stdout.strip(), "0")
        self.assertEqual(self.pods.execute("decode", "spectrumkvd", "id", "-u").stdout.strip(), "65532")
        listing = self.pods.execute("decode", "spectrumkvd", "stat", "-c", "%u %g %a", "/run/spectrumkv/worker.sock")
        self.assertEqual(listing.stdout.split(), ["65532", "65532", "660"])
        segments = self.pods.execute("decode", "spectrumkvd", "sh", "-c", "stat -c '%u %g %a' /dev/shm/spectrumkv-kv-*")
        self.assertEqual(segments.stdout.split(), ["0", "65532", "660"])
        rights = self.pods.execute("decode", "spectrumkvd", "sh", "-c", "grep CapEff /proc/1/status; touch /x", check=False)
        self.assertIn("CapEff:\t0000000000000000\n", rights.stdout)
        self.assertIn("Read-only file system", rights.stderr)
        for path in ("/run/spectrumkv-admin", "/etc/spectrumkv-tls"):
            self.assertNotEqual(self.pods.execute("decode", "worker", "ls", path, check=False).returncode, 0, path)

    def test_3_nobody_without_a_certificate(self):
        before = self.pods.metrics("prefill")["spectrumkv_handshake_failures_total"]
        self.assertFalse(dial_without_certificate(self.pods.address("prefill")))
        until(lambda: self.pods.metrics("prefill")["spectrumkv_handshake_failures_total"] > before, 10)

    def test_4_a_killed_daemon_comes_back(self):
        """As a crash and the kubelet's restart of the container: the worker goes on by itself."""
        worker = self.pods.state("decode", "worker")["Pid"]
        sidecar = self.pods.name("decode", "spectrumkvd")
        # In the midst of a request, as near as one can see from outside.
        until(lambda: len(self.pods.told("prefill", "published")) > len(self.committed()))
        self.podman.run("kill", "--signal", "KILL", sidecar)
        until(lambda: not self.pods.state("decode", "spectrumkvd")["Running"])
        self.assertEqual(self.pods.state("decode", "spectrumkvd")["ExitCode"], 137)
        self.podman.run("start", sidecar)
        until(lambda: self.pods.told("decode", "registered again"))
        self.more()
        self.assertEqual(self.pods.state("decode", "worker")["Pid"], worker, "the worker was not started anew")
        self.assertEqual(len(self.pods.told("decode", "registered again")), 1)
        self.assertEqual(int(self.pods.status("decode")["pools"]), 1)
        lost = self.pods.told("decode", "failed")
        self.assertTrue(lost, "a kill in the midst of it must be seen by the worker")
        print(f"attempts that failed by the kill: {[(e['request'], e['reason'] or e['error'][:60]) for e in lost]}")

    def test_5_the_other_is_drained(self):
        """As the kubelet ends a pod: all preStop hooks at once, then the worker, then the sidecar."""
        failed = len(self.pods.told("decode", "failed"))
        wait = self.pods.hook("prefill", "worker", "preStop")
        time.sleep(0.5)
        self.assertIsNone(wait.poll(), "the worker is not to be ended yet")
        drain = self.pods.hook("prefill", "spectrumkvd", "preStop")
        told = drain.communicate(timeout=70)[0]
        self.assertEqual(drain.returncode, 0, told)
        self.assertIn("0 left", told)
        wait.communicate(timeout=10)
        self.assertEqual(wait.returncode, 0)
        self.assertFalse(self.pods.serving("prefill", "readiness"), "the Service must lose this pod")
        self.assertTrue(self.pods.serving("prefill", "liveness"), "the kubelet must not restart it")
        until(lambda: len(self.pods.told("decode", "failed")) > failed)
        for event in self.pods.told("decode", "failed")[failed:]:
            self.assertIn("DRAINING", event["error"], "the drain refused new work and broke nothing that ran")
        self.end("prefill")

    def test_6_the_last_one_ends_and_nothing_was_lost(self):
        self.end("decode")
        events = self.committed()
        self.assertEqual([e["request"] for e in events], list(range(len(events))), "each once, in order")
        self.assertTrue(all(e["right"] for e in events))
        (rest,) = self.pods.told("decode", "resting")
        self.assertEqual((rest["done"], rest["wrong"]), (len(events), 0))
        print(f"{len(events)} requests, each committed once with the right words")

    def end(self, role):
        self.podman.run("stop", "--time", "45", self.pods.name(role, "worker"))
        self.assertEqual(self.pods.state(role, "worker")["ExitCode"], 0)
        left = self.pods.execute(role, "spectrumkvd", "ls", "/dev/shm").stdout.split()
        self.assertEqual([name for name in left if name.startswith("spectrumkv-kv-")], [], "names of segments are left")
        status = self.pods.status(role)
        self.assertEqual((int(status.get("pools", 0)), int(status.get("inflight_transfers", 0))), (0, 0))
        peak = self.pods.execute(role, "spectrumkvd", "grep", "VmHWM", "/proc/1/status").stdout.split()
        print(f"most memory of the {role} daemon, shared pages of the pool included: {int(peak[1]) >> 10} MiB")
        self.podman.run("stop", "--time", "70", self.pods.name(role, "spectrumkvd"))
        self.assertEqual(self.pods.state(role, "spectrumkvd")["ExitCode"], 0)


if __name__ == "__main__":
    unittest.main(failfast=True)
