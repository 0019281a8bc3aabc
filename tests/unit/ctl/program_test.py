#!/usr/bin/env python3
"""spectrumkvctl without a daemon: help, exit codes, codec commands. program_test.py CTL VECTORS"""

import array
import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

CTL, VECTORS = sys.argv[1:3]
DATA = os.path.join(VECTORS, "..", "..", "data", "smollm2_135m_wikitext2_256")


def ctl(*arguments, **env):
    done = subprocess.run([CTL, *arguments], capture_output=True, text=True, timeout=60, check=False,
                          env={**os.environ, **env})
    return done.returncode, done.stdout, done.stderr


def write_npy(path, descr, shape, values):
    """A .npy of version 1 without NumPy."""
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + values.tobytes())


def value(yaml, key):
    """The text behind a key, over its lines."""
    return re.search(rf"^{key}: (.*(?:\n    .*)*)$", yaml, re.MULTILINE).group(1)


def number(yaml, key):
    return float(value(yaml, key))


def numbers(yaml, key):
    return [float(text) for text in value(yaml, key).strip("[]").split(",")]


def errors(yaml, key):
    return {tier: float(error) for tier, error in re.findall(r"(\w+): ([0-9.e+-]+)", value(yaml, key))}


class ProgramTest(unittest.TestCase):
    def test_help_lists_commands_and_exit_codes(self):
        code, out, _ = ctl("--help")
        self.assertEqual(code, 0)
        for word in ("transfers cancel", "codec check", "Exit codes", "--admin-socket"):
            self.assertIn(word, out)
        commands = [line[2:].split("  ")[0] for line in out.split("\n\n")[1].splitlines()[1:]]
        self.assertGreater(len(commands), 20)
        for command in commands:
            name = [word for word in command.split() if word.islower()]
            code, out, _ = ctl(*name, "--help")
            self.assertEqual((code, out.split("\n")[0]), (0, f"usage: spectrumkvctl {command} [FLAGS]"))

    def test_version(self):
        code, out, _ = ctl("--version")
        self.assertEqual(code, 0)
        self.assertRegex(out, r"^spectrumkvctl \d+\.\d+\.\d+ \((unknown|[0-9a-f]{12,}(-dirty)?)\)\n$")

    def test_wrong_usage_is_2(self):
        for words in ([], ["nope"], ["status", "--nope"], ["status", "extra"], ["send"], ["log-level"],
                      ["put", "/nonexistent.npy"], ["codec", "check", "/nonexistent"],
                      ["codec", "check", VECTORS, "--backend", "nope"], ["codec", "bench", "--seconds", "0"]):
            with self.subTest(words):
                code, out, err = ctl(*words)
                self.assertEqual((code, out), (2, ""))
                self.assertTrue(err)

    def test_a_file_that_is_none_is_named_with_its_cause(self):
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(f"{folder}/pipe")
            os.symlink("loop", f"{folder}/loop")
            for path, cause in (("/nonexistent.npy", "No such file or directory"), ("/dev/zero", "is not a regular file"),
                                (folder, "is not a regular file"), (f"{folder}/pipe", "is not a regular file"),
                                (f"{folder}/loop", "Too many levels of symbolic links")):
                with self.subTest(path):
                    code, out, err = ctl("put", path, "--layers", "1", "--heads", "1", "--head-dim", "64")
                    self.assertEqual((code, out), (2, ""))
                    self.assertIn(path, err)
                    self.assertIn(cause, err)

    def test_segments_of_the_dead_are_swept(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("spectrumkv-kv-1-dead", "spectrumkv-kv-2-alive", "engine-kv", "other"):
                with open(f"{folder}/{name}", "w", encoding="utf-8"):
                    pass
            with open(f"{folder}/spectrumkv-kv-2-alive", encoding="utf-8") as alive:
                fcntl.flock(alive, fcntl.LOCK_EX)  # as its owner has it
                sweep = ("segments", "sweep", "--directory", folder)
                self.assertEqual(ctl(*sweep, "--dry-run"), (0, "spectrumkv-kv-1-dead\n", ""))
                self.assertEqual(len(os.listdir(folder)), 4)
                code, out, _ = ctl(*sweep, "--json")
                self.assertEqual((code, json.loads(out)), (0, {"segments": ["spectrumkv-kv-1-dead"]}))
                self.assertEqual(ctl(*sweep), (0, "", ""))
                self.assertEqual(ctl(*sweep, "--prefix", "engine-"), (0, "engine-kv\n", ""))
                self.assertEqual(set(os.listdir(folder)), {"spectrumkv-kv-2-alive", "other"})
                self.assertEqual(ctl(*sweep, "--prefix", "")[0], 2)
                code, out, err = ctl("segments", "sweep", "--directory", f"{folder}/typo")
                self.assertEqual((code, out), (2, ""))
                self.assertIn("cannot be listed", err)

    def test_profile_measures_a_model(self):
        """On layers 2 to 4 of a real prompt; the same with a channel of outliers; without queries."""
        layers, tokens, heads, query_heads, dim = 3, 256, 3, 9, 64
        with open(f"{DATA}/kv.f16", "rb") as file:
            kv = array.array("H", file.read())[2 * 2 * tokens * heads * dim : 5 * 2 * tokens * heads * dim]
        with open(f"{DATA}/queries_recent64.f16", "rb") as file:
            queries = array.array("H", file.read())[2 * 64 * query_heads * dim : 5 * 64 * query_heads * dim]
        with tempfile.TemporaryDirectory() as folder:
            write_npy(f"{folder}/kv.npy", "<f2", (layers, 2, tokens, heads, dim), kv)
            write_npy(f"{folder}/q.npy", "<f2", (layers, 64, query_heads, dim), queries)
            code, out, err = ctl("profile", f"{folder}/kv.npy", "--model", "it's", "--queries", f"{folder}/q.npy",
                                 "--layer-weights")
            self.assertEqual(code, 0, err)
            self.assertIn("model: 'it''s'\n", out)
            self.assertGreater(number(out, "k_weight"), 1.7)
            self.assertLessEqual(number(out, "k_weight"), 6.8)
            self.assertEqual(len(numbers(out, "layer_weights")), layers)
            self.assertLess(max(numbers(out, "  outliers")), 6)
            k, v = errors(out, "k_errors"), errors(out, "v_errors")
            for plane in (k, v):
                self.assertEqual(list(plane), ["Q8", "Q4", "Q3", "Q2", "P8", "P4"])
                self.assertTrue(0 < plane["Q8"] < 1e-4 < 0.008 < plane["Q4"] < 0.013 < plane["Q3"] < plane["Q2"] < 0.2, plane)
            # One channel of every head of K is 40: the codec's centres take it, the plain tiers meet it.
            for at in range(0, len(kv), dim):
                if at // (tokens * heads * dim) % 2 == 0:
                    kv[at + 5] = 0x5100
            write_npy(f"{folder}/kv.npy", "<f2", (layers, 2, tokens, heads, dim), kv)
            code, _, err = ctl("profile", f"{folder}/kv.npy", f"{folder}/kv.npy", "--model", "m", "--revision", "r",
                               "--output", f"{folder}/m.yaml")
            self.assertEqual(code, 0, err)
            with open(f"{folder}/m.yaml", encoding="utf-8") as file:
                out = file.read()
            self.assertIn("revision: 'r'\n", out)
            self.assertNotIn("k_weight", out)
            self.assertNotIn("layer_weights", out)
            self.assertEqual(number(out, "  tokens"), 2 * tokens)
            self.assertGreater(min(numbers(out, "  outliers_uncentred")), 6)
            self.assertLess(max(numbers(out, "  outliers")), 6)
            outlying = errors(out, "k_errors")
            self.assertGreater(outlying["P4"], 5 * k["P4"])
            self.assertLess(outlying["Q4"], 1.1 * k["Q4"])

    def test_profile_refuses_what_does_not_fit(self):
        with tempfile.TemporaryDirectory() as folder:
            write_npy(f"{folder}/kv.npy", "<f2", (1, 2, 64, 2, 8), array.array("H", [0x3C00] * (2 * 64 * 2 * 8)))
            write_npy(f"{folder}/other.npy", "<f2", (1, 2, 64, 1, 16), array.array("H", [0x3C00] * (2 * 64 * 16)))
            write_npy(f"{folder}/short.npy", "<f2", (1, 2, 8, 2, 8), array.array("H", [0x3C00] * (2 * 8 * 2 * 8)))
            write_npy(f"{folder}/q.npy", "<f4", (1, 4, 3, 8), array.array("f", [1] * (4 * 3 * 8)))
            kv, model = f"{folder}/kv.npy", ("--model", "m")
            for words, says in (((kv,), "--model"), (model, "KV.npy"), ((f"{folder}/none.npy", *model), "No such file"),
                                ((f"{folder}/short.npy", *model), "at least 64 tokens"), ((kv, f"{folder}/other.npy", *model), "different"),
                                ((kv, "--queries", f"{folder}/q.npy", *model), "queries must be"),
                                ((kv, "--queries", f"{folder}/q.npy,{folder}/q.npy", *model), "2 files for 1"),
                                ((kv, "--layer-weights", *model), "needs --queries"), ((kv, "--sinks", "64", *model), "--sinks"),
                                ((f"{folder}/q.npy", *model), "KV must be")):
                with self.subTest(words):
                    code, out, err = ctl("profile", *words)
                    self.assertEqual((code, out), (2, ""))
                    self.assertIn(says, err)

    def test_numbers_that_no_field_holds_are_refused(self):
        """Each in its own right, before anybody is asked; none wraps to a small one."""
        with tempfile.TemporaryDirectory() as folder:
            write_npy(f"{folder}/kv.npy", "<f2", (1, 2, 4, 1, 8), array.array("H", [0] * (2 * 4 * 8)))
            write_npy(f"{folder}/empty.npy", "<f2", (1, 2, 4, 0, 8), array.array("H"))
            pool = ("--pool", "p", "--epoch", "1")
            for words in (("transfers", "refine", "t", "--layers", "4294967296"),
                          ("transfers", "refine", "t", "--layers", "0,18446744073709551615"),
                          ("transfers", "refine", "t", "--first", "4294967296", "--count", "1"),
                          ("transfers", "refine", "t", "--count", "4294967296"),
                          ("transfers", "--limit", "4294967296"),
                          ("plan", *pool, "--blocks", "18446744073709551616", "--tokens", "1"),
                          ("plan", *pool, "--blocks", "0", "--tokens", "4294967296"),
                          ("plan", *pool, "--blocks", "0", "--tokens", "1", "--group", "4294967296"),
                          ("plan", *pool, "--blocks", "0", "--tokens", "1", "--skip", "4294967296"),
                          ("plan", *pool, "--blocks", "0", "--tokens", "1", "--sinks", "4294967296"),
                          ("pools", "create", "--layers", "4294967297", "--heads", "1", "--head-dim", "8", "--blocks", "1"),
                          ("put", f"{folder}/empty.npy"), ("doctor", "--worker-uid", "4294967296")):
                with self.subTest(words):
                    code, out, _ = ctl(*words, "--timeout", "0.1", SPECTRUMKV_ADMIN_SOCKET="/nonexistent/a.sock",
                                       SPECTRUMKV_WORKER_SOCKET="/nonexistent/w.sock")
                    self.assertEqual((code, out), (2, ""))

    def test_no_daemon_is_3(self):
        for words in (["status"], ["pools"], ["transfers"], ["peers"], ["config"], ["drain"], ["health"],
                      ["transfers", "show", "x"]):
            with self.subTest(words):
                code, out, err = ctl(*words, "--timeout", "0.1", SPECTRUMKV_ADMIN_SOCKET="/nonexistent/a.sock",
                                     SPECTRUMKV_WORKER_SOCKET="/nonexistent/w.sock")
                self.assertEqual((code, out), (3, ""))
                self.assertIn("/nonexistent/", err)
                self.assertIn("No such file or directory", err)

    def test_why_no_daemon_answers(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/file", "w", encoding="utf-8"):
                pass
            dead = socket.socket(socket.AF_UNIX)
            dead.bind(f"{folder}/dead")
            dead.close()
            causes = {"file": "Connection refused", "dead": "Connection refused", "file/below": "Not a directory"}
            if os.geteuid() != 0:
                os.mkdir(f"{folder}/locked", 0)
                causes["locked/socket"] = "Permission denied"
            else:
                print("SKIPPED: a socket without permission: root has all")
            for name, cause in causes.items():
                for words in (["status"], ["pools", "renew", "--pool", "x", "--epoch", "1"]):
                    with self.subTest(name=name, words=words):
                        code, _, err = ctl(*words, "--timeout", "0.1", SPECTRUMKV_ADMIN_SOCKET=f"{folder}/{name}",
                                           SPECTRUMKV_WORKER_SOCKET=f"{folder}/{name}")
                        self.assertEqual(code, 3, err)
                        self.assertIn(f"{name}: {cause}", err)

    def test_codec_list_and_selftest(self):
        code, out, _ = ctl("codec", "list", "--json")
        self.assertEqual(code, 0)
        names = {row["backend"]: row["supported"] for row in json.loads(out)["results"]}
        self.assertEqual(set(names), {"scalar", "avx2", "avx512"})
        self.assertTrue(names["scalar"])
        for name in sorted(name for name, supported in names.items() if not supported):
            print(f"SKIPPED: codec commands on {name}: this machine cannot run it")
        code, out, _ = ctl("codec", "selftest")
        self.assertEqual(code, 0, out)
        self.assertNotIn("FAILED", out)

    def test_codec_check_finds_one_changed_byte(self):
        code, out, _ = ctl("codec", "check", VECTORS, "--backend", "scalar", "--json")
        self.assertEqual(code, 0)
        counts = json.loads(out)
        self.assertEqual([counts[k] for k in ("encoded", "decoded", "refused", "differences")], [60, 68, 37, 0])
        def flip_last(path):
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))

        def make_valid(path):
            shutil.copyfile(os.path.join(VECTORS, "only_q4.chunk"), path)

        for name, change, words in (("only_q4.chunk", flip_last, "scalar only_q4"), ("only_q4.out", flip_last, "only_q4"),
                                    ("any_codes_ff.out", flip_last, "any_codes_ff"),
                                    ("must_fail/magic.chunk", make_valid, "must_fail magic")):
            with self.subTest(name), tempfile.TemporaryDirectory() as folder:
                copy = os.path.join(folder, "vectors")
                shutil.copytree(VECTORS, copy)
                change(os.path.join(copy, name))
                code, _, err = ctl("codec", "check", copy, "--backend", "scalar")
                self.assertEqual(code, 1)
                self.assertIn(words, err)

    def test_codec_check_refuses_a_broken_index(self):
        for index in ("", "[]", '{"unknown": []}', '{"cases": [{"name": "../x", "tokens": 1}]}',
                      '{"cases": [{"name": "x", "tokens": 1e9, "heads": 1, "head_dim": 64, "dtype": 1}]}', "{}"):
            with self.subTest(index), tempfile.TemporaryDirectory() as folder:
                with open(os.path.join(folder, "index.json"), "w", encoding="utf-8") as file:
                    file.write(index)
                self.assertEqual(ctl("codec", "check", folder)[0], 2)

    def test_codec_bench(self):
        code, out, _ = ctl("codec", "bench", "--backend", "scalar", "--seconds", "0.001", "--json")
        self.assertEqual(code, 0)
        results = json.loads(out)["results"]
        self.assertEqual([r["tier"] for r in results], ["RAW", "Q8", "Q4", "Q3", "Q2", "P8", "P4"])
        self.assertTrue(all(r["encode_gbps"] > 0 and r["decode_gbps"] > 0 for r in results))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
