#!/usr/bin/env python3
"""spectrumkvctl top beside two real daemons that move something. top_test.py SPECTRUMKVD SPECTRUMKVCTL"""

import fcntl
import json
import os
import pathlib
import pty
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from ctl_daemon import Daemon

SPECTRUMKVD, CTL = sys.argv[1:3]


class TopTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="skv-top-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.here, cls.there = (Daemon(SPECTRUMKVD, CTL, f"{cls.folder}/{name}") for name in ("p", "d"))
        for daemon in (cls.here, cls.there):
            cls.addClassCleanup(daemon.stop)
        shape = ("--layers", "4", "--heads", "4", "--head-dim", "64", "--blocks", "64")
        cls.source = cls.here.json("pools", "create", *shape)["pool"]["pool_id"]
        cls.target = cls.there.json("pools", "create", *shape)["pool"]["pool_id"]
        cls.stopping = threading.Event()
        cls.moved = 0
        cls.mover = threading.Thread(target=cls.move, daemon=True)
        cls.mover.start()
        cls.addClassCleanup(cls.mover.join, 60)
        cls.addClassCleanup(cls.stopping.set)

    @classmethod
    def move(cls):
        blocks = ("--tokens", "1024", "--blocks", "0-63")
        while not cls.stopping.is_set():
            name = f"t{cls.moved}"
            cls.there.ctl("expect", "--transfer", name, "--pool", cls.target, *blocks)
            cls.here.ctl("send", "--transfer", name, "--pool", cls.source, *blocks, "--peer", cls.there.peer, "--budget", "0.3",
                         "--allocator", "GREEDY", "--wait")
            cls.here.ctl("transfers", "show", "nobody")  # an error to be seen
            cls.moved += 1

    def frames(self, daemon, *words):
        done = subprocess.run(daemon.command("top", "--json", *words), capture_output=True, text=True, timeout=100, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_the_numbers_are_those_of_what_moves(self):
        """What rates add up to over the frames has moved in that time, as the counters of the daemon say."""
        before = self.here.json("peers")["peers"]
        frames = self.frames(self.here, "--iterations", "4", "--interval", "1")
        self.assertEqual(len(frames), 4)
        after = self.here.json("peers")["peers"]
        for frame in frames:
            self.assertGreaterEqual(frame["seconds"], 1)
            self.assertFalse(frame["restarted"])
        busy = [frame for frame in frames if frame["sender"]["kv_bytes_per_second"] > 0]
        self.assertTrue(busy, frames)
        for frame in busy:
            self.assertGreater(frame["sender"]["ratio"], 2)
            self.assertAlmostEqual(sum(frame["sender"]["tier_share"].values()), 1)
            self.assertEqual(frame["receiver"]["kv_bytes_per_second"], 0)
        sent = sum(frame["peers"][0]["sent_bytes_per_second"] * frame["seconds"] for frame in frames if frame["peers"])
        ever = sum(int(peer["wire_bytes_sent"]) for peer in after) - sum(int(peer["wire_bytes_sent"]) for peer in before)
        self.assertGreater(sent, 0)
        self.assertLessEqual(sent, ever * 1.001)
        self.assertEqual({peer["address"] for frame in frames for peer in frame["peers"]}, {self.there.peer})
        self.assertTrue(any("queue not_found" in frame["errors_per_second"] for frame in frames), frames)

    def test_the_receiver(self):
        frames = self.frames(self.there, "--iterations", "3")
        self.assertTrue(any(frame["receiver"]["kv_bytes_per_second"] > 0 for frame in frames), frames)
        self.assertTrue(any(frame["receiver"]["ended_per_second"]["committed"] > 0 for frame in frames), frames)
        self.assertGreater(frames[-1]["saved_bytes"], 0)

    def test_a_pipe_gets_one_frame(self):
        for words in ((), ("--once",), ("--once", "--interval", "0.2")):
            code, out, err = self.here.ctl("top", *words)
            self.assertEqual((code, err), (0, ""))
            self.assertEqual(out.count("spectrumkvd "), 1, out)
            self.assertNotIn("\x1b", out)
            for word in ("SENDING", "raw : wire", "tiers", "errors /s:", "PEER", self.there.peer):
                self.assertIn(word, out)
        self.assertEqual(self.here.ctl("top", "--iterations", "2", "--interval", "0.2")[1].count("spectrumkvd "), 2)

    def test_a_terminal_is_drawn_over(self):
        """In a terminal of 16 lines by 60: frames begin at its top and no line is longer than it is wide."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 16, 60, 0, 0))
        with subprocess.Popen(self.here.command("top", "--iterations", "3", "--interval", "0.2"), stdin=slave, stdout=slave,
                              stderr=slave, close_fds=True) as top:
            os.close(slave)
            text = b""
            while True:
                try:
                    part = os.read(master, 65536)
                except OSError:  # the end of a terminal
                    break
                if not part:
                    break
                text += part
            self.assertEqual(top.wait(60), 0)
        os.close(master)
        frames = text.decode().split("\x1b[H\x1b[J")[1:]
        self.assertEqual(len(frames), 3, text)
        for frame in frames:
            lines = frame.replace("\r", "").splitlines()
            self.assertLessEqual(len(lines), 15)
            self.assertTrue(all(len(line) <= 60 for line in lines), lines)

    def test_a_daemon_that_ends(self):
        daemon = Daemon(SPECTRUMKVD, CTL, f"{self.folder}/ends")
        self.addCleanup(daemon.stop)
        with subprocess.Popen(daemon.command("top", "--iterations", "1000", "--interval", "0.2", "--timeout", "5"), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) as top:
            self.assertIn("spectrumkvd", top.stdout.readline())
            daemon.stop()
            _, err = top.communicate(timeout=60)
            self.assertEqual(top.returncode, 3, err)
            self.assertIn("admin.sock", err)

    def test_wrong_usage(self):
        for words in (("--interval", "0.1"), ("--interval", "3601"), ("--iterations", "0"), ("--once", "--iterations", "2"), ("x",)):
            code, out, err = self.here.ctl("top", *words)
            self.assertEqual((code, out), (2, ""), words)
            self.assertTrue(err)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
