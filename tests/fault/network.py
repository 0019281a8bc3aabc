"""Two network namespaces with one link between them, which can be shaped, cut, and made deaf on one side.

The namespaces have no names: a process holds each of them, and all of it goes when those processes go, however the test
ends. Nothing outside of them is touched.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import threading

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
ADDRESSES = ("10.77.0.1", "10.77.0.2")
# No card has it: frames to it are dropped by the other end without a word.
_NOBODY = "02:00:00:00:00:99"


def end_with_parent():
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def why_not():
    """Why there can be no network of the test's own; "" where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        subprocess.run(["unshare", "--net", "ip", "link", "add", "kv0", "type", "veth", "peer", "name", "kv1"],
                       check=True, capture_output=True, text=True)  # fmt: skip
        return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces or no veth: {getattr(error, 'stderr', '') or error}".strip()


def own_mounts():
    """From now on what this process mounts is its own affair, and its children's. Called before threads are made."""
    if _libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


class Network:
    def __init__(self, rate="100mbit"):
        self._rate = rate
        self._holders = [
            subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=end_with_parent) for _ in ADDRESSES
        ]
        own = os.readlink("/proc/self/ns/net")
        for holder in self._holders:
            while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
                if holder.poll() is not None:
                    raise RuntimeError("unshare --net has ended")
        pids = [str(holder.pid) for holder in self._holders]
        self._in(0, "ip", "link", "add", "kv0", "type", "veth", "peer", "name", "kv0", "netns", pids[1])
        for side, address in enumerate(ADDRESSES):
            self._in(side, "ip", "addr", "add", f"{address}/24", "dev", "kv0")
            self._in(side, "ip", "link", "set", "lo", "up")
            self._in(side, "ip", "link", "set", "kv0", "up")
        self.slow(rate)

    def _in(self, side, *command):
        subprocess.run([*self.launcher(side), *command], check=True)

    def launcher(self, side):
        """Words before a command that shall run in the namespace of this side."""
        return ["nsenter", f"--net=/proc/{self._holders[side].pid}/ns/net"]

    @contextlib.contextmanager
    def inside(self, side):
        """The block's thread is in the namespace of this side: sockets it makes are."""
        with open("/proc/thread-self/ns/net") as own, open(f"/proc/{self._holders[side].pid}/ns/net") as wanted:
            if _libc.setns(wanted.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                _libc.setns(own.fileno(), _CLONE_NEWNET)

    def slow(self, rate):
        for side in range(2):
            self._in(side, "tc", "qdisc", "replace", "dev", "kv0", "root", "tbf", "rate", rate, "burst", "64kb", "limit", "4mb")

    def cut(self):
        """No bit passes, and both sides' kernels know it."""
        self._in(0, "ip", "link", "set", "kv0", "down")

    def mute(self, side):
        """What this side sends is lost without a word; what is sent to it arrives."""
        self._in(side, "ip", "neigh", "replace", ADDRESSES[1 - side], "lladdr", _NOBODY, "dev", "kv0", "nud", "permanent")

    def heal(self):
        for side in range(2):
            self._in(side, "ip", "link", "set", "kv0", "up")
            self._in(side, "ip", "neigh", "flush", "dev", "kv0", "nud", "permanent")
        self.slow(self._rate)

    def close(self):
        for holder in self._holders:
            holder.kill()
            holder.wait()


def in_thread(work):
    """The result of work() on a thread of its own."""
    out = []

    def run():
        try:
            out.append((work(), None))
        except BaseException as error:  # noqa: BLE001: raised again below
            out.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = out[0]
    if error is not None:
        raise error
    return result


def in_host(net, side, work):
    """The result of work() as it is in that side's network, or here where there is none."""
    if net is None:
        return work()

    def inside():
        with net.inside(side):
            return work()

    return in_thread(inside)
