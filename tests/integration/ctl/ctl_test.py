#!/usr/bin/env python3
"""spectrumkvctl and the C++ example against two real daemons. ctl_test.py SPECTRUMKVD SPECTRUMKVCTL ROUND_TRIP"""

import array
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import ctl_daemon

SPECTRUMKVD, CTL, ROUND_TRIP = sys.argv[1:4]
LAYERS, TOKENS, HEADS, HEAD_DIM = 3, 70, 2, 64


def daemon_in(folder, **keys):
    keys = {name.replace("__", "."): str(value) for name, value in keys.items()}
    return ctl_daemon.Daemon(SPECTRUMKVD, CTL, folder, keys)


class CtlTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="spectrumkv-ctl-")
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.prefill = daemon_in(os.path.join(cls.folder, "p"), refine__cache_bytes="64MiB")
        cls.addClassCleanup(cls.prefill.stop)
        cls.decode = daemon_in(os.path.join(cls.folder, "d"))
        cls.addClassCleanup(cls.decode.stop)
        # [layers, 2, tokens, heads, head_dim] float32 that float16 holds exactly, as bare bytes.
        count = LAYERS * 2 * TOKENS * HEADS * HEAD_DIM
        cls.values = array.array("f", (((i * 37) % 401 - 200) / 64 for i in range(count)))
        cls.raw = os.path.join(cls.folder, "kv.bin")
        with open(cls.raw, "wb") as file:
            file.write(cls.values.tobytes())

    shape = ("--layers", str(LAYERS), "--heads", str(HEADS), "--head-dim", str(HEAD_DIM), "--dtype", "float32")

    def pools(self, destination_blocks):
        """A filled source pool and an empty destination of another block size: their ids."""
        put = self.prefill.json("put", self.raw, *self.shape, "--model", "m", "--blocks", "7,6,0-2")
        self.assertEqual((put["tokens"], put["blocks"]), (TOKENS, LAYERS * 2 * 5))
        created = self.decode.json("pools", "create", *self.shape, "--model", "m", "--block-tokens", "32", "--blocks",
                                   destination_blocks)
        return put["pool_id"], created["pool"]["pool_id"]

    def get(self, daemon, pool, blocks, block_tokens):
        path = os.path.join(self.folder, "out.bin")
        daemon.json("get", *self.shape, "--pool", pool, "--blocks", blocks, "--tokens", str(TOKENS), "--out", path,
                    "--block-tokens", block_tokens)
        got = array.array("f")
        with open(path, "rb") as file:
            got.frombytes(file.read())
        return got

    def test_status_health_and_lists(self):
        status = self.prefill.json("status")
        self.assertTrue(status["ready"])
        self.assertEqual(status["peer_security"], "plain")
        for name in ("worker_address", "peer_address", "admin_address", "health_address", "metrics_address"):
            self.assertTrue(status[name], name)
        code, out, _ = self.prefill.ctl("status")
        self.assertEqual(code, 0)
        self.assertIn("ready", out)
        self.assertRegex(out, r"GPUs: +(none \(.+\)|GPU-)")
        self.assertEqual(self.prefill.ctl("health")[:2], (0, "SERVING\n"))
        for service in ("", "readiness", "liveness"):
            health = self.prefill.json("health", "--address", status["health_address"], "--service", service)
            self.assertEqual(health, {"status": "SERVING"})
        code, out, _ = self.prefill.ctl("health", "--address", status["health_address"], "--service", "nope")
        self.assertEqual((code, out), (1, "SERVICE_UNKNOWN\n"))
        for words in (("pools",), ("transfers",), ("transfers", "--active"), ("peers",)):
            self.assertEqual(self.prefill.ctl(*words)[0], 0, words)
            self.prefill.json(*words)
        code, out, _ = self.prefill.ctl("config")
        self.assertEqual(code, 0)
        self.assertIn("send_slots: 4", out)

    def test_log_level(self):
        previous = self.prefill.json("log-level", "debug")["previous_level"]
        self.assertEqual(self.prefill.json("log-level", previous)["previous_level"], "debug")
        self.assertEqual(self.prefill.ctl("log-level", "loud")[0], 4)

    def test_selftest_of_the_daemon(self):
        results = self.prefill.json("codec", "selftest", "--daemon")["results"]
        self.assertIn("scalar", [r["backend"] for r in results if r["passed"]])

    def test_put_and_get(self):
        pool, _ = self.pools("8")
        self.assertEqual(self.get(self.prefill, pool, "7,6,0-2", "16"), self.values)
        path = os.path.join(self.folder, "out.npy")
        self.prefill.json("get", *self.shape, "--pool", pool, "--blocks", "7,6,0-2", "--tokens", str(TOKENS), "--out",
                          path)
        # And back from .npy, into the same pool at other blocks.
        self.assertEqual(self.prefill.json("put", path, "--pool", pool, "--blocks", "3,4,5,6,7")["tokens"], TOKENS)
        self.assertEqual(self.get(self.prefill, pool, "3-7", "16"), self.values)
        code, out, _ = self.prefill.ctl("pools")
        self.assertEqual(code, 0)
        self.assertRegex(out, rf"POOL .* LEASE +OWNER\n(.*\n)*{pool} .* uid {os.geteuid()}\n")
        code, _, err = self.prefill.ctl("put", path, "--pool", pool, "--blocks", "0-3")
        self.assertEqual(code, 2)
        self.assertIn("70 tokens need 5 blocks", err)
        self.assertGreater(int(self.prefill.json("pools", "renew", "--pool", pool)["lease_ttl_ms"]), 0)
        self.assertEqual(self.prefill.ctl("pools", "remove", "--pool", pool)[0], 0)
        code, _, err = self.prefill.ctl("pools", "remove", "--pool", pool)
        self.assertEqual(code, 4)
        self.assertIn("NOT_FOUND", err)

    def test_push_raw_is_exact(self):
        source, destination = self.pools("8")
        blocks = ("--tokens", str(TOKENS), "--blocks")
        token = "000102030405060708090a0b0c0d0e0f"
        self.decode.json("expect", "--transfer", "raw", "--token", token, "--pool", destination, *blocks, "5,1,3")
        report = self.prefill.json("send", "--transfer", "raw", "--token", token, "--pool", source, *blocks, "7,6,0-2",
                                   "--peer", self.decode.status["peer_address"], "--allocator", "raw", "--budget",
                                   "1.1", "--wait")
        self.assertEqual(report["state"], "TRANSFER_STATE_COMMITTED")
        self.assertEqual(self.decode.json("transfers", "wait", "raw")["state"], "TRANSFER_STATE_COMMITTED")
        self.assertEqual(self.get(self.decode, destination, "5,1,3", "32"), self.values)
        self.assertEqual(self.decode.ctl("first-token", "raw", "--seconds", "0.2")[0], 0)
        self.assertEqual(self.decode.json("transfers", "show", "raw")["role"], "TRANSFER_ROLE_RECEIVER")
        self.assertEqual(self.decode.ctl("transfers", "cancel", "raw")[0], 1)
        code, out, _ = self.decode.ctl("transfers")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"raw +receiver +COMMITTED +70")
        self.assertGreater(len(self.prefill.json("peers")["peers"]), 0)

    def test_two_pools_in_one_transfer(self):
        peer = self.decode.status["peer_address"]
        pools = [self.pools("8") for _ in range(2)]
        for part, (source, destination) in enumerate(pools):
            common = ("--transfer", "both", "--part", f"{part}/2", "--tokens", str(TOKENS))
            self.decode.json("expect", *common, "--pool", destination, "--blocks", "5,1,3")
            self.prefill.json("send", *common, "--pool", source, "--blocks", "7,6,0-2", "--peer", peer, "--allocator", "raw",
                              "--budget", "1.1")  # fmt: skip
        report = self.decode.json("transfers", "wait", "both")
        self.assertEqual(report["state"], "TRANSFER_STATE_COMMITTED")
        self.assertEqual([part["part"].get("index", 0) for part in report["parts"]], [0, 1])
        for _, destination in pools:
            self.assertEqual(self.get(self.decode, destination, "5,1,3", "32"), self.values)
        self.assertRegex(self.decode.ctl("transfers", "show", "both")[1], r"parts: +0 of 2 COMMITTED .*, 1 of 2 COMMITTED")
        for bad in ("2", "0/", "/2", "a/b", "0/2x", "100/101"):
            code, _, err = self.decode.ctl("expect", "--transfer", "bad", "--part", bad, "--tokens", "1", "--pool", destination,
                                           "--blocks", "0")  # fmt: skip
            self.assertEqual(code, 2, bad)
            self.assertIn("--part", err)

    def test_refined_from_the_cache(self):
        source, destination = self.pools("8")
        blocks, peer = ("--tokens", str(TOKENS), "--blocks"), self.decode.status["peer_address"]
        coarse = ("--allocator", "uniform", "--uniform-tier", "q4", "--budget", "0.6", "--retain", "60")
        self.decode.json("expect", "--transfer", "fine", "--pool", destination, *blocks, "5,1,3", "--refinable")
        self.prefill.json("send", "--transfer", "fine", "--pool", source, *blocks, "7,6,0-2", "--peer", peer, *coarse, "--wait")
        self.assertNotEqual(self.get(self.decode, destination, "5,1,3", "32"), self.values)
        self.assertEqual(self.decode.ctl("transfers", "wait", "fine", "--exact", "--timeout", "0.3")[0], 4)
        self.assertEqual(self.prefill.json("transfers", "release", "fine", "--keep-in-cache"), {"kept_in_cache": True})
        self.decode.json("transfers", "refine", "fine", "--wait")
        code, out, _ = self.decode.ctl("transfers", "apply", "fine.refined")
        self.assertEqual(code, 0, out)
        self.assertRegex(out, r"complete: +yes")
        self.assertEqual(self.get(self.decode, destination, "5,1,3", "32"), self.values)
        code, out, _ = self.decode.ctl("transfers", "wait", "fine", "--exact")
        self.assertEqual(code, 0, out)
        self.assertRegex(out, r"exact: +yes")
        self.assertEqual(self.prefill.ctl("transfers", "wait", "fine", "--exact")[0], 1)  # a sender cannot know
        self.assertEqual(self.prefill.ctl("transfers", "release", "fine", "--keep-in-cache")[0], 1)  # nothing is retained
        self.assertEqual(self.prefill.ctl("transfers", "release", "fine")[0], 4)
        self.assertEqual(self.decode.ctl("transfers", "release", "fine")[0], 0)

    def test_a_prefix_that_is_there(self):
        source, destination = self.pools("8")
        peer = self.decode.status["peer_address"]
        self.decode.json("expect", "--transfer", "rest", "--pool", destination, "--tokens", "10", "--skip", "6", "--blocks", "5,1")
        report = self.prefill.json("send", "--transfer", "rest", "--pool", source, "--tokens", "10", "--skip", "6", "--blocks", "7,6",
                                   "--peer", peer, "--allocator", "raw", "--budget", "1.5", "--wait")  # fmt: skip
        self.assertEqual((report["state"], report["tokens"]), ("TRANSFER_STATE_COMMITTED", 10))
        self.assertEqual(self.decode.ctl("expect", "--transfer", "bad", "--pool", destination, "--tokens", "1", "--skip", "200",
                                         "--blocks", "5")[0], 4)  # fmt: skip

    def test_pull_under_a_budget_as_planned(self):
        source, destination = self.pools("8")
        blocks = ("--tokens", str(TOKENS), "--blocks")
        policy = ("--allocator", "greedy", "--budget", "0.4", "--importance", "position")
        plan = self.prefill.json("plan", "--pool", source, *blocks, "7,6,0-2", *policy)
        self.assertLessEqual(float(plan["budget_used"]), 0.4)
        self.assertIn("wire bytes", self.prefill.ctl("plan", "--pool", source, *blocks, "7,6,0-2", *policy)[1])
        self.prefill.json("publish", "--transfer", "pull", "--pool", source, *blocks, "7,6,0-2", *policy)
        report = self.decode.json("fetch", "--transfer", "pull", "--peer", self.prefill.status["peer_address"], "--pool",
                                  destination, *blocks, "5,1,3", "--wait")
        self.assertEqual(report["state"], "TRANSFER_STATE_COMMITTED")
        self.assertEqual(report["wire_bytes"], plan["wire_bytes"])
        got = self.get(self.decode, destination, "5,1,3", "32")
        error = sum((x - y) ** 2 for x, y in zip(self.values, got)) / sum(x * x for x in self.values)
        self.assertGreater(error, 0)
        self.assertLess(error, 0.05)

    def test_profile_of_a_model_is_planned_by(self):
        """What `profile` writes the daemon reads: for its own model, and for no other."""
        profiles = os.path.join(self.folder, "profiles")
        os.mkdir(profiles)
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {(LAYERS, 2, TOKENS, HEADS, HEAD_DIM)}, }}\n".encode()
        with open(os.path.join(self.folder, "kv.npy"), "wb") as file:
            file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + self.values.tobytes())
        code, _, err = self.prefill.ctl("profile", os.path.join(self.folder, "kv.npy"), "--model", "known", "--output",
                                        os.path.join(profiles, "mine.yaml"))
        self.assertEqual(code, 0, err)
        daemon = daemon_in(os.path.join(self.folder, "profiled"), policy__profile_dir=profiles)
        self.addCleanup(daemon.stop)
        for model, profile in (("known", "mine"), ("unknown", "default")):
            pool = daemon.json("put", self.raw, *self.shape, "--model", model, "--blocks", "0-4")["pool_id"]
            plan = daemon.json("plan", "--pool", pool, "--tokens", str(TOKENS), "--blocks", "0-4", "--budget", "0.4")
            self.assertEqual(plan["model_profile"], profile)
            daemon.json("publish", "--transfer", model, "--pool", pool, "--tokens", str(TOKENS), "--blocks", "0-4")
            self.assertEqual(daemon.json("transfers", "show", model)["model_profile"], profile)
        with open(os.path.join(profiles, "broken.yaml"), "w", encoding="utf-8") as file:
            file.write("model: [")
        with self.assertRaisesRegex(RuntimeError, "broken.yaml:1:"):
            daemon_in(os.path.join(self.folder, "broken"), policy__profile_dir=profiles)

    def test_budget_for_a_time(self):
        source, destination = self.pools("8")
        blocks = ("--tokens", str(TOKENS), "--blocks")
        auto = ("--budget", "auto", "--target-seconds", "0.5")
        plan = self.prefill.json("plan", "--pool", source, *blocks, "7,6,0-2", *auto, "--link-rate", "1e4",
                                 "--min-budget", "0.4")
        self.assertEqual(plan["budget_choice"]["reason"], "BUDGET_REASON_OUT_OF_REACH")
        self.assertEqual(plan["budget_choice"]["budget"], 0.4)
        self.assertEqual(plan["predicted_limited_by"], "LIMITED_BY_LINK")
        out = self.prefill.ctl("plan", "--pool", source, *blocks, "7,6,0-2", *auto, "--link-rate", "1e9")[1]
        self.assertRegex(out, r"budget choice: +1.00, RAW_MEETS_TARGET of 500.0 ms, predicted .* at 953.7 MiB/s")
        self.assertRegex(out, r"time: .*\(predicted, at 953.7 MiB/s, limited by \w+\)")
        peer = self.decode.status["peer_address"]
        out = self.prefill.ctl("plan", "--pool", source, *blocks, "7,6,0-2", "--peer", peer)[1]
        self.assertRegex(out, r"time: +(not known: LINK_UNKNOWN|.*\(predicted)")
        self.decode.json("expect", "--transfer", "auto", "--pool", destination, *blocks, "5,1,3")
        report = self.prefill.json("send", "--transfer", "auto", "--pool", source, *blocks, "7,6,0-2", "--peer", peer,
                                   *auto, "--wait")
        self.assertEqual(report["state"], "TRANSFER_STATE_COMMITTED")
        self.assertEqual(report["budget_choice"]["target_seconds"], 0.5)
        self.assertNotEqual(report["limited_by"], "LIMITED_BY_UNSPECIFIED")
        out = self.prefill.ctl("transfers", "show", "auto")[1]
        self.assertRegex(out, r"limited by: +\w+ \(")
        self.assertIn("budget choice:", out)
        out = self.prefill.ctl("peers")[1]
        self.assertRegex(out, r"PEER .* LINK +DECODE")
        self.assertRegex(out, r"encode: +[\d.]+ [KMG]iB/s [\d.]+ [KMG]iB/s [\d.]+ [KMG]iB/s")
        for words in (("--budget", "auto"), ("--budget", "0.5", "--target-seconds", "1"), ("--min-budget", "0.3")):
            code, _, err = self.prefill.ctl("plan", "--pool", source, *blocks, "7,6,0-2", *words)
            self.assertEqual(code, 2, words)
            self.assertRegex(err, "target-seconds|min-budget")

    def test_cancel_what_waits(self):
        _, destination = self.pools("8")
        self.decode.json("expect", "--transfer", "wait", "--pool", destination, "--tokens", "70", "--blocks", "0-2")
        report = self.decode.json("transfers", "cancel", "wait")
        self.assertEqual(report["state"], "TRANSFER_STATE_CANCELLED")
        self.assertEqual(self.decode.ctl("transfers", "wait", "wait")[0], 1)

    def test_errors_of_the_daemon_are_4_with_their_reason(self):
        source, _ = self.pools("8")
        cases = (
            (("transfers", "show", "never"), "NOT_FOUND"),
            (("plan", "--pool", "nope", "--tokens", "1", "--blocks", "0"), "NOT_FOUND"),
            (("plan", "--pool", source, "--tokens", "70", "--blocks", "0-2"), "INVALID_BLOCKS"),
            (("plan", "--pool", source, "--epoch", "1", "--tokens", "1", "--blocks", "0"), "STALE_EPOCH"),
            (("plan", "--pool", source, "--tokens", "70", "--blocks", "0-4", "--budget", "0.01"), "BUDGET_TOO_SMALL"),
            (("pools", "create", "--layers", "1", "--heads", "1", "--head-dim", "7", "--blocks", "1"),
             "INVALID_ARGUMENT"),
        )
        for words, reason in cases:
            with self.subTest(words):
                code, _, err = self.prefill.ctl(*words)
                self.assertEqual(code, 4, err)
                self.assertIn(reason, err)

    def test_a_full_daemon_is_asked_again(self):
        daemon = daemon_in(os.path.join(self.folder, "full"), transfer__max_active=1)
        self.addCleanup(daemon.stop)
        pool = daemon.json("pools", "create", *self.shape, "--blocks", "2")["pool"]["pool_id"]
        expect = ("expect", "--pool", pool, "--tokens", "1")
        daemon.json(*expect, "--transfer", "a", "--blocks", "0")
        begin = time.monotonic()
        code, _, err = daemon.ctl(*expect, "--transfer", "b", "--blocks", "1", "--timeout", "1")
        self.assertEqual(code, 4, err)
        self.assertRegex(err, r"TRANSFERS_FULL(.|\n)*try again after \d+ ms")
        self.assertTrue(0.5 < time.monotonic() - begin < 5, "it has tried for about a second")
        waiting = threading.Thread(target=lambda: codes.append(daemon.ctl(*expect, "--transfer", "b", "--blocks", "1")))
        codes = []
        waiting.start()
        waiting.join(0.5)
        self.assertEqual(codes, [], "it waits")
        daemon.json("transfers", "cancel", "a")
        waiting.join(60)
        self.assertEqual([code for code, _, _ in codes], [0], codes)

    def test_cpp_example(self):
        done = subprocess.run([ROUND_TRIP, f"{self.prefill.folder}/worker.sock", f"{self.decode.folder}/worker.sock",
                               self.decode.status["peer_address"], "0.3"], capture_output=True, text=True, timeout=120,
                              check=False)
        self.assertEqual(done.returncode, 0, done.stderr + self.decode.log())
        self.assertIn("layers ready: 4", done.stdout)
        self.assertRegex(done.stdout, r"relative error: 0\.\d*[1-9]")

    def test_drain_then_stop(self):
        daemon = daemon_in(os.path.join(self.folder, "drain"))
        self.addCleanup(daemon.stop)
        self.assertEqual(daemon.json("drain", "--wait")["transfers_left"], "0")
        self.assertEqual(daemon.ctl("status")[0], 1)
        self.assertIn("draining", daemon.ctl("status")[1])
        health = ("health", "--address", daemon.status["health_address"], "--service")
        self.assertEqual(daemon.ctl(*health, "readiness")[:2], (1, "NOT_SERVING\n"))
        self.assertEqual(daemon.ctl(*health, "liveness")[:2], (0, "SERVING\n"))
        code, _, err = daemon.ctl("pools", "create", *self.shape, "--blocks", "1")
        self.assertEqual(code, 4)
        self.assertIn("DRAINING", err)
        self.assertEqual(daemon.stop(), 0)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
