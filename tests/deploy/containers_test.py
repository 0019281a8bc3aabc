#!/usr/bin/env python3
"""The image is built for real, measured, and run as a cluster would run it: another user, nothing to write, no rights."""

import contextlib
import hashlib
import json
import pathlib
import shutil
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import containers
from containers import BASE, CUDA_IMAGE, IMAGE, ROOT

LOCKED = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL", "--security-opt=no-new-privileges",
          "--volume", "/run/spectrumkv"]  # fmt: skip
MAX_OWN_BYTES = 60 << 20  # what the image adds to its base


def until(what, timeout_s=30):
    end = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > end:
            raise AssertionError("it never came")
        time.sleep(0.2)


class ImageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.podman = containers.prepare()
        start = time.monotonic()
        cls.revision = cls.podman.build_product()
        print(f"built in {time.monotonic() - start:.0f} s")

    def in_image(self, program, *words, check=True):
        return self.podman.run("run", "--rm", "--network=none", *LOCKED, "--entrypoint", program, IMAGE, *words, check=check)

    @contextlib.contextmanager
    def running(self, image=IMAGE):
        """The name of a container that answers its health check."""
        name = self.podman.run("run", "--detach", "--network=none", *LOCKED, image, "--set", "peer.security=plain").stdout.strip()
        try:
            until(lambda: self.podman.run("healthcheck", "run", name, check=False).returncode == 0)
            yield name
        except BaseException:
            print(self.podman.run("logs", name, check=False))
            raise
        finally:
            self.podman.run("kill", "--signal", "CONT", name, check=False)
            self.podman.run("rm", "--force", "--volumes", name)

    def status(self, name):
        return json.loads(self.podman.run("exec", name, "spectrumkvctl", "status", "--json").stdout)

    def test_size(self):
        whole, base = self.podman.size(IMAGE), self.podman.size(BASE)
        print(f"the image has {whole / 1e6:.0f} MB, {(whole - base) / 1e6:.0f} MB of them beside its base")
        self.assertLess(whole - base, MAX_OWN_BYTES)
        self.assertNotEqual(self.in_image("sh", "-c", "command -v g++ cmake", check=False).returncode, 0)

    def test_labels_and_what_runs(self):
        config = self.podman.inspect("image", IMAGE)["Config"]
        labels = {key.removeprefix("org.opencontainers.image."): value for key, value in config["Labels"].items()}
        self.assertEqual(labels["revision"], self.revision)
        self.assertEqual((labels["title"], labels["licenses"], labels["base.name"]), ("SpectrumKV", "Apache-2.0", BASE))
        self.assertEqual(config["User"], "65532:65532")
        told = self.in_image("spectrumkvd", "--version").stdout
        self.assertEqual(told, f"spectrumkvd {labels['version']} ({self.revision})\n")

    def test_descriptors_are_inside(self):
        inside = self.in_image("sha256sum", "/usr/local/share/spectrumkv/spectrumkv.protoset").stdout.split()[0]
        self.assertEqual(inside, hashlib.sha256((ROOT / "proto/spectrumkv.protoset").read_bytes()).hexdigest())

    def test_a_start_without_certificates_says_why(self):
        done = self.podman.run("run", "--rm", "--network=none", *LOCKED, IMAGE, check=False)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("peer.tls.certificate_file", done.stdout + done.stderr)

    def test_locked_down_it_is_healthy(self):
        with self.running() as name:
            self.assertIs(self.status(name)["ready"], True)
            self.assertEqual(self.podman.run("exec", name, "id", "-u").stdout.strip(), "65532")
            self.assertNotEqual(self.podman.run("exec", name, "touch", "/usr/local/x", check=False).returncode, 0)
            # The daemon is process 1: it gets the signal, drains and ends well.
            self.podman.run("stop", "--time", "20", name)
            self.assertEqual(self.podman.inspect("container", name)["State"]["ExitCode"], 0)

    def test_the_health_check_notices_a_daemon_that_hangs(self):
        with self.running() as name:
            self.podman.run("kill", "--signal", "STOP", name)
            self.assertNotEqual(self.podman.run("healthcheck", "run", name, check=False).returncode, 0)

    def test_the_image_for_gpus(self):
        """CUDA_IMAGE: the toolkit is lent to the compilation and left out of the result, which runs without a GPU too."""
        nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
        if nvcc is None:
            self.skipTest("SKIPPED: CUDA_IMAGE: no nvcc here to make an image of")
        self.podman.make_toolkit(nvcc)
        start = time.monotonic()
        self.podman.build_cuda_product()
        whole = self.podman.size(CUDA_IMAGE)
        print(f"with CUDA: built in {time.monotonic() - start:.0f} s; {whole / 1e6:.0f} MB")
        self.assertLess(whole - self.podman.size(BASE), 2 * MAX_OWN_BYTES)
        for image, why in ((IMAGE, "without CUDA"), (CUDA_IMAGE, "driver")):
            with self.running(image) as name:
                self.assertIn(why, self.status(name)["no_device_reason"])
                self.assertNotEqual(self.podman.run("exec", name, "ls", "/usr/local/cuda", check=False).returncode, 0)


if __name__ == "__main__":
    unittest.main()
