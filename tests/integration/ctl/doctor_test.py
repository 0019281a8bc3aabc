#!/usr/bin/env python3
"""spectrumkvctl doctor against real daemons in settings that are wrong. doctor_test.py SPECTRUMKVD SPECTRUMKVCTL"""

import contextlib
import functools
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from concurrent import futures

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]
from authority import Ca
from ctl_daemon import Daemon

SPECTRUMKVD, CTL = sys.argv[1:3]
ROOT = os.geteuid() == 0

def needs(condition, what):
    """Skips, and says so."""

    def wrap(test):
        @functools.wraps(test)
        def run(self):
            if not condition():
                print(f"SKIPPED: {test.__name__}: {what}", file=sys.stderr)
                self.skipTest(what)
            test(self)

        return run

    return wrap


def mounts():
    return ROOT and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def peer_with_clock(seconds):
    """Answers PeerService.Probe with the time of day plus `seconds`; its address."""
    import grpc

    def probe(_request, _context):
        number, text = time.time_ns() + int(seconds * 1e9), b""
        while number > 0x7F:
            text, number = text + bytes([number & 0x7F | 0x80]), number >> 7
        return b"\x0a\x04play\x18" + text + bytes([number])  # version "play", unix_time_ns

    handlers = {"Probe": grpc.unary_unary_rpc_method_handler(probe)}
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("spectrumkv.v1.PeerService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


class DoctorTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="skv-doc-"))
        os.chmod(self.folder, 0o755)
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.count = 0

    def daemon(self, keys=None, **options):
        self.count += 1
        daemon = Daemon(SPECTRUMKVD, CTL, str(self.folder / f"d{self.count}"), keys, **options)
        self.addCleanup(daemon.stop)
        os.chmod(daemon.folder, 0o755)
        return daemon

    def in_namespace(self, script, keys=None):
        """A daemon behind mounts of its own, which `script` makes; spectrumkvctl sees them, too."""
        daemon = self.daemon(keys, launcher=["unshare", "-m", "sh", "-ec", script + '; exec "$@"', "sh"])
        daemon.wrap_ctl = ["nsenter", "-t", str(daemon.process.pid), "-m"]
        return daemon

    def finds(self, daemon, level, check, subject, words, *flags):
        """doctor has this finding, at that level, with these words in it, and says what to do; its exit code fits."""
        code, found = daemon.doctor(*flags)
        self.assertIn((check, subject), found, found.keys())
        one = found[check, subject]
        self.assertEqual(one["level"], level, one)
        self.assertRegex(one["what"], words)
        self.assertTrue(one["advice"] or level in ("ok", "unknown"), one)
        self.assertEqual(code, 1 if any(f["level"] == "problem" for f in found.values()) else 0, found)
        return one

    def test_two_that_are_well(self):
        here, there = self.daemon(), self.daemon()
        code, found = here.doctor("--peer", there.peer)
        # Memory and CPUs are those of the machine the test runs on.
        bad = {key for key, f in found.items() if f["level"] == "problem"} - {("shared-memory", "/dev/shm")}
        self.assertEqual(bad, set(), found)
        self.assertIn(code, (0, 1))
        for key in (("daemon", ""), ("data-path", ""), ("peer", there.peer), ("clock", there.peer), ("link", there.peer),
                    ("sockets", f"{here.folder}/worker.sock")):
            self.assertEqual(found[key]["level"], "ok", found[key])
        self.assertEqual(found["certificate", ""]["level"], "warning")  # plain
        self.assertRegex(found["link", there.peer]["what"], r"one connection carries [\d.]+ [KMG]iB/s, round trip [\d.]+ [mu]s")
        self.assertRegex(found["peer", there.peer]["what"], r"^reached in [\d.]+ ms, \d+\.\d+\.\d+")
        code, out, _ = here.ctl("doctor", "--strict", "--peer", there.peer)
        self.assertEqual(code, 1, "plain is a warning")
        self.assertRegex(out, r"(?m)^warning +certificate +peers are not authenticated.*\n +-> mtls")
        self.assertRegex(out, r"(?m)^problems: 0, warnings: \d+$")
        self.finds(here, "unknown", "peer", "", "has dialled nobody")

    def test_no_daemon(self):
        done = subprocess.run([CTL, "doctor", "--admin-socket", f"{self.folder}/none.sock", "--timeout", "0.2"], capture_output=True,
                              text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 3, done.stdout)
        self.assertRegex(done.stdout, r"(?m)^problem +daemon +does not answer: .*none\.sock: No such file")
        self.assertRegex(done.stdout, r"(?m)^\w+ +shared-memory +/dev/shm: ")

    def test_wrong_usage(self):
        for words in (["--worker-gid", "1"], ["--worker-uid", "-1"], ["--nope"], ["extra"]):
            done = subprocess.run([CTL, "doctor", *words], capture_output=True, text=True, timeout=60, check=False)
            self.assertEqual((done.returncode, done.stdout), (2, ""), words)

    @needs(mounts, "needs root and mount namespaces")
    def test_small_shared_memory(self):
        daemon = self.in_namespace("mount -t tmpfs -o size=32m none /dev/shm")
        self.finds(daemon, "problem", "shared-memory", "/dev/shm", "32.0 MiB, .* default of container runtimes")
        # From outside, too: it looks where the daemon looks.
        daemon.wrap_ctl = []
        self.finds(daemon, "problem", "shared-memory", "/dev/shm", "32.0 MiB")

    @needs(mounts, "needs root and mount namespaces")
    def test_full_shared_memory(self):
        daemon = self.in_namespace("mount -t tmpfs -o size=80m none /dev/shm; head -c 81000000 /dev/zero > /dev/shm/left")
        self.finds(daemon, "warning", "shared-memory", "/dev/shm", "nearly full")

    @needs(lambda: shutil.which("prlimit"), "needs prlimit")
    def test_few_descriptors(self):
        daemon = self.daemon(launcher=["prlimit", "--nofile=700:700", "--memlock=65536:65536"])
        self.finds(daemon, "warning", "open-files", "", r"limit 700, \d+ open; .* need about 1024")
        self.finds(daemon, "ok", "locked-memory", "", "limit 64.0 KiB")

    @needs(mounts, "needs root and mount namespaces")
    def test_cgroup_of_version_2(self):
        files = ("mount -t tmpfs none /sys/fs/cgroup; cd /sys/fs/cgroup; echo 150000 100000 > cpu.max; "
                 "printf 'nr_periods 500\\nnr_throttled 100\\n' > cpu.stat; echo 1073741824 > memory.max; echo 524288000 > memory.current; cd /")
        daemon = self.in_namespace(files, {"codec.threads": "8"})
        one = self.finds(daemon, "warning", "cpu", "", r"quota 1\.50, throttled in 20\.0 % of the periods, 8 threads code")
        self.assertIn("codec.threads", one["advice"])
        self.finds(daemon, "warning", "memory", "", r"limit 1\.00 GiB, 524\.0 MiB free; staging and memory.max_owned_bytes may take 4\.")

    @needs(lambda: ROOT and os.access("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", os.W_OK), "needs a writable cgroup v1 cpu controller")
    def test_a_real_quota(self):
        group = pathlib.Path(f"/sys/fs/cgroup/cpu/skv-doctor-{os.getpid()}")
        group.mkdir()
        self.addCleanup(group.rmdir)
        (group / "cpu.cfs_period_us").write_text("100000")
        (group / "cpu.cfs_quota_us").write_text("60000")
        daemon = self.daemon(launcher=["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"])
        self.addCleanup(daemon.stop)
        self.finds(daemon, "warning", "cpu", "", r"quota 0\.60")

    def test_sockets(self):
        daemon = self.daemon()  # the socket has mode 0660
        socket = f"{daemon.folder}/worker.sock"
        os.chmod(daemon.folder, 0o700)
        self.finds(daemon, "problem", "sockets", socket, r"for group \d+, which cannot enter .*mode 0700")
        self.finds(daemon, "problem", "worker", "uid 12345", r"cannot get to the socket: .*\(mode 0700", "--worker-uid", "12345")
        os.chmod(daemon.folder, 0o755)
        self.finds(daemon, "ok", "sockets", socket, "mode 0660: for group")
        self.finds(daemon, "problem", "worker", "uid 12345", r"worker\.sock \(mode 0660", "--worker-uid", "12345")
        self.finds(daemon, "ok", "worker", "uid 12345", "may connect", "--worker-uid", "12345", "--worker-gid", str(os.getgid()))
        picky = self.daemon({"worker.allowed_uids": "[0, 7]"})
        self.finds(picky, "problem", "worker", "uid 8", "not one of worker.allowed_uids", "--worker-uid", "8")
        private = self.daemon({"worker.socket_mode": "0600"})
        self.finds(private, "ok", "sockets", f"{private.folder}/worker.sock", "alone")
        os.rename(f"{private.folder}/worker.sock", f"{private.folder}/moved.sock")
        self.finds(private, "problem", "sockets", f"{private.folder}/worker.sock", "no socket at this path")

    def test_peers_that_cannot_be_reached(self):
        daemon = self.daemon({"peer.allowed_hosts": "[127.0.0.1]"})
        for peer, words in (("127.0.0.1:1", "NOBODY_LISTENS"), ("10.9.9.9:7420", "PEER_NOT_ALLOWED"), ("nonsense", "INVALID_PEER"),
                            (daemon.status["health_address"], "NOT_A_PEER")):
            self.finds(daemon, "problem", "peer", peer, words, "--peer", peer)
        # Several at once, each but once.
        _, found = daemon.doctor("--peer", f"127.0.0.1:1,{daemon.peer},127.0.0.1:1")
        self.assertEqual(found["peer", daemon.peer]["level"], "ok")
        self.assertEqual(found["peer", "127.0.0.1:1"]["level"], "problem")

    def test_those_it_has_dialled(self):
        here, there = self.daemon(), self.daemon()
        shape = ("--layers", "1", "--heads", "1", "--head-dim", "64", "--blocks")
        pool = here.json("pools", "create", *shape, "4")["pool"]["pool_id"]
        target = there.json("pools", "create", *shape, "4")["pool"]["pool_id"]
        there.json("expect", "--transfer", "t", "--pool", target, "--tokens", "16", "--blocks", "0")
        here.json("send", "--transfer", "t", "--pool", pool, "--tokens", "16", "--blocks", "0", "--peer", there.peer, "--wait")
        self.finds(here, "ok", "peer", there.peer, "reached in")
        self.finds(here, "ok", "data-path", "", "1 recent transfers: host, ")
        there.stop()
        self.finds(here, "problem", "peer", there.peer, "NOBODY_LISTENS")

    def mtls(self, ca, name, days=30, identity="spectrumkv", **more):
        keys = {key.replace("__", "."): str(value) for key, value in ca.issue(name, days, identity).items()}
        return {**keys, "peer.tls.reload_interval_ms": "200", **{key.replace("__", "."): value for key, value in more.items()}}

    def authority(self, name):
        (self.folder / name).mkdir()
        return Ca(self.folder / name)

    def test_certificates(self):
        ca, other = self.authority("ca"), self.authority("other")
        here, plain = self.daemon(self.mtls(ca, "here")), self.daemon()
        there = self.daemon(self.mtls(ca, "there", days=3))
        stranger = self.daemon(self.mtls(other, "stranger"))
        someone = self.daemon(self.mtls(ca, "someone", identity="someone", peer__identities="[someone, spectrumkv]"))
        self.finds(here, "ok", "certificate", "", r"CN=spectrumkv, ends in (29|30)\.\d days")
        self.finds(here, "ok", "peer", there.peer, "reached", "--peer", there.peer)
        self.finds(there, "warning", "certificate", "", r"ends in [23]\.\d days")
        for daemon, peer, words in ((here, plain.peer, "PEER_SECURITY_MISMATCH"), (plain, here.peer, "PEER_SECURITY_MISMATCH"),
                                    (here, stranger.peer, "PEER_HANDSHAKE"), (here, someone.peer, "PEER_IDENTITY"),
                                    (someone, here.peer, "PEER_IDENTITY")):
            self.finds(daemon, "problem", "peer", peer, words, "--peer", peer)

    def test_files_that_went_wrong_later(self):
        ca, other = self.authority("ca"), self.authority("other")
        daemon = self.daemon(self.mtls(ca, "here"))
        ca.issue("next", 30)
        shutil.copy(ca.folder / "next.key", ca.folder / "here.key")
        self.finds(daemon, "problem", "certificate", "", "TLS_FILE_INVALID.*is not the key of certificate")
        shutil.copy(ca.folder / "next.pem", ca.folder / "here.pem")
        self.finds(daemon, "ok", "certificate", "", "ends in")
        shutil.copy(other.folder / "ca.pem", ca.folder / "ca.pem")
        self.finds(daemon, "problem", "certificate", "", "PEER_CERTIFICATE: .*unable to get local issuer certificate")
        (ca.folder / "here.pem").unlink()
        self.finds(daemon, "problem", "certificate", "", "TLS_FILE_UNREADABLE")

    @needs(lambda: importlib.util.find_spec("grpc"), "needs grpcio")
    def test_a_clock_that_is_wrong(self):
        """There is but one clock here, so the peer with another one is played by this test: it answers Probe alone."""
        here = self.daemon()
        for seconds, level, words in ((30, "warning", r"its clock is (29|30)\.\d+ s ahead"), (-7200, "problem", r"its clock is 7\d{3}\.\d+ s behind"),
                                      (0.2, "ok", "its clock is")):
            with peer_with_clock(seconds) as peer:
                self.finds(here, level, "clock", peer, words, "--peer", peer)

    def test_draining(self):
        daemon = self.daemon()
        daemon.json("drain", "--wait")
        self.finds(daemon, "warning", "daemon", "", "draining")

    def test_a_slow_codec(self):
        daemon = self.daemon({"codec.backend": "scalar"})
        self.finds(daemon, "warning", "data-path", "", "backend scalar")

    def test_a_probe_ends_with_the_daemon(self):
        """One that waits for a peer which does not answer does not hold up the stop."""
        import socket

        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(8)
            daemon = self.daemon({"drain.timeout_ms": "100"})
            peer = f"127.0.0.1:{silent.getsockname()[1]}"
            with subprocess.Popen(daemon.command("doctor", "--peer", peer, "--json"), stdout=subprocess.PIPE, text=True) as doctor:
                with silent.accept()[0]:  # the probe has begun
                    began = time.monotonic()
                    self.assertEqual(daemon.stop(), 0, daemon.log())
                    self.assertLess(time.monotonic() - began, 4, "probes wait 5 s")
                    told = doctor.communicate(timeout=60)[0]
                self.assertIn('"peer"', told)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
