"""Images and containers by podman, without a registry and beside whatever podman has here already.

Everything lies in one folder (SPECTRUMKV_CONTAINERS, of the build): images, containers, the base image made by
debootstrap. It is kept, so that a second run builds only what changed, and may be removed at any time but during one.
"""

import atexit
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = "localhost/debian:bookworm-slim"
IMAGE, WORKER = "localhost/spectrumkv:test", "localhost/spectrumkv-demo-worker:test"
CUDA_IMAGE, TOOLKIT = "localhost/spectrumkv:cuda-test", "localhost/cuda-toolkit:test"
NEEDED = ("podman", "buildah", "debootstrap", "runc", "catatonit", "iptables", "openssl")
_BUILD_S = 3000


def skip(reason):
    """Says why nothing can be checked here, and ends the program so that CTest takes it for skipped."""
    print(f"SKIPPED: containers: {reason}", flush=True)
    sys.exit(77)


def prepare():
    """A Podman with its base image, or the end of the program where there can be none."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        skip(f"{', '.join(missing)} not installed; scripts/install-deps --containers brings them")
    if os.geteuid() != 0:
        skip("debootstrap and the ownership of volumes need root")
    podman = Podman(pathlib.Path(os.environ.get("SPECTRUMKV_CONTAINERS", ROOT / "build/containers")))
    probe = podman.run("info", "--format", "{{.Store.GraphDriverName}}", check=False)
    if probe.returncode != 0:
        skip(f"podman does not work here: {probe.stderr.strip().splitlines()[-1:]}")
    podman.sweep()
    atexit.register(podman.leave)
    podman.make_base()
    return podman


class Podman:
    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # runc, since crun refuses hybrid cgroups; limits, since raising them may not be permitted.
        config = folder / "containers.conf"
        config.write_text('[containers]\ndefault_ulimits = ["nofile=20000:20000", "nproc=10000:10000"]\n'
                          '[engine]\nruntime = "runc"\n')  # fmt: skip
        self._environment = {**os.environ, "CONTAINERS_CONF": str(config)}
        self._program = ["podman", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]

    def run(self, *words, check=True, timeout=300):
        with subprocess.Popen([*self._program, *map(str, words)], text=True, env=self._environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              start_new_session=True) as process:  # fmt: skip
            try:
                out, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # a build has compilers of its own
                raise
        done = subprocess.CompletedProcess(process.args, process.returncode, out, errors)
        if check and done.returncode != 0:
            raise AssertionError(f"podman {' '.join(map(str, words))}: {done.returncode}\n{out[-4000:]}{errors[-4000:]}")
        return done

    def start(self, *words):
        """A podman that goes on beside us."""
        return subprocess.Popen([*self._program, *map(str, words)], env=self._environment, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip

    def sweep(self):
        """Removes what a run left that was ended in the midst of a build."""
        subprocess.run(["buildah", *self._program[1:], "rm", "--all"], env=self._environment, check=False,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)  # fmt: skip

    def leave(self):
        """Unmounts what podman leaves mounted, so that the folder is like any other again."""
        subprocess.run(["umount", self.folder / "storage/overlay"], check=False, stderr=subprocess.DEVNULL, timeout=60)

    def exists(self, image):
        return self.run("image", "exists", image, check=False).returncode == 0

    def inspect(self, kind, name):
        told = json.loads(self.run(kind, "inspect", name).stdout)
        return told[0] if isinstance(told, list) else told  # one pod is no list

    def size(self, image):
        return self.inspect("image", image)["Size"]

    def make_base(self):
        """What debian:bookworm-slim is, made of Debian's packages."""
        if self.exists(BASE):
            return
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            made = subprocess.run(["debootstrap", "--variant=minbase", "bookworm", f"{folder}/base", _mirror()],
                                  capture_output=True, text=True, check=False)  # fmt: skip
            if made.returncode != 0:
                skip(f"debootstrap cannot reach a mirror: {made.stdout.strip().splitlines()[-1:]}")
            for left in ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists"):
                shutil.rmtree(f"{folder}/base/{left}", ignore_errors=True)
                os.makedirs(f"{folder}/base/{left}")
            subprocess.run(["tar", "-C", f"{folder}/base", "-cf", f"{folder}/base.tar", "."], check=True)
            self.run("import", "--change", "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                     f"{folder}/base.tar", BASE)  # fmt: skip

    def build(self, tag, dockerfile, *words):
        # pip trusts what this machine trusts, without a word of it in the Dockerfile or in the image.
        (self.folder / "pip.conf").write_text("[global]\ncert = /run/trusted.pem\n")
        self.run(
            "build", "--isolation", "chroot", "--format", "docker", "-t", tag, "-f", ROOT / dockerfile,
            "--volume", "/etc/ssl/certs/ca-certificates.crt:/run/trusted.pem:ro",
            "--volume", f"{self.folder}/pip.conf:/etc/pip.conf:ro",
            "--build-arg", f"BASE_IMAGE={BASE}", *words, ROOT, timeout=_BUILD_S,
        )  # fmt: skip

    def build_product(self):
        revision = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True,
                                  check=False).stdout.strip()  # fmt: skip
        self.build(IMAGE, "Dockerfile", "--build-arg", f"REVISION={revision}")
        return revision

    def make_toolkit(self, nvcc):
        """What an image of NVIDIA's lends the compilation, /usr/local/cuda behind a link, made of the toolkit of `nvcc`."""
        toolkit = pathlib.Path(nvcc).resolve().parents[1]
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            # Not the libraries of mathematics, which are gigabytes.
            parts = [p.name for p in toolkit.iterdir() if p.name != "lib"]
            parts += [f"lib/{p.name}" for p in (toolkit / "lib").glob("libcuda*")]
            subprocess.run(["tar", "-C", toolkit, "--transform", "s,^,usr/local/cuda-toolkit/,S", "-cf",
                            f"{folder}/toolkit.tar", *parts], check=True)  # fmt: skip
            (pathlib.Path(folder) / "Dockerfile").write_text(f"FROM {BASE}\nADD toolkit.tar /\nRUN ln -s cuda-toolkit /usr/local/cuda\n")
            self.run("build", "--isolation", "chroot", "-t", TOOLKIT, folder, timeout=_BUILD_S)

    def build_cuda_product(self):
        self.build(CUDA_IMAGE, "Dockerfile", "--build-arg", f"CUDA_IMAGE={TOOLKIT}")

    def build_worker(self):
        self.build(WORKER, "deploy/demo/Dockerfile")


def _mirror():
    """The first mirror that this machine's apt uses."""
    for path in sorted(pathlib.Path("/etc/apt").glob("sources.list*")) + sorted(pathlib.Path("/etc/apt/sources.list.d").glob("*")):
        if path.is_file():
            found = re.search(r"^(?:URIs:|deb (?:\[[^]]*\] )?)\s*(https?://\S*debian\S*)", path.read_text(), re.M)
            if found and "security" not in found.group(1):
                return found.group(1)
    return "http://deb.debian.org/debian"
