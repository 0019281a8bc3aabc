"""Shared memory that a worker owns."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import weakref

import numpy as np
from numpy.typing import NDArray

SHM_DIRECTORY = "/dev/shm"
# Names of segments whose caller gave none. Only those are swept unasked: who made them locked them.
STALE_PREFIX = "spectrumkv-kv-"
_MODE = 0o660
_ATTEMPTS = 100


class SharedSegment:
    """Creates the file `name` (a random one where empty) of `size_bytes`, fully populated, in `directory`.

    In /dev/shm it is a POSIX shared memory object; `name` is then as for shm_open, "/...".

    The file has mode 0660 and the group of its directory, where this process may give it that one, so that a daemon of
    another user and the same group can open it. Every page is written once: a hole would be filled by whoever touches
    it first, and the daemon refuses segments with holes.

    `memory` is uint8 [size_bytes]. The name is removed by close(); the memory itself lives as long as someone has it
    mapped. A process that is killed cannot remove its names: sweep_stale_segments does, and making a segment without a
    name sweeps first. Not thread-safe.
    """

    def __init__(self, size_bytes: int, name: str = "", directory: str = SHM_DIRECTORY) -> None:
        self.size_bytes = size_bytes
        if not name:
            with contextlib.suppress(OSError):  # segments may be made where names cannot be listed
                sweep_stale_segments(directory)
        self.name, descriptor = _create(name, directory)
        path = os.path.join(directory, self.name.lstrip("/"))
        try:
            _share_with_group(descriptor, directory)
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)  # ENOSPC here, not SIGBUS later
            except OSError as error:
                raise OSError(error.errno, f"{os.strerror(error.errno or 0)} for {size_bytes} bytes", path) from None
            self._map = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        self._unlink = weakref.finalize(self, _unlink, path, os.getpid())
        self.memory: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.memory[:: mmap.PAGESIZE] = 0

    def close(self) -> None:
        """Removes the name; also done when the object or the process goes. Idempotent. Arrays that still point into the
        memory stay valid."""
        self._unlink()


def sweep_stale_segments(directory: str = SHM_DIRECTORY, prefix: str = STALE_PREFIX) -> list[str]:
    """Removes segments in `directory` that processes of this user left behind when they were killed; their names.

    A segment is locked (flock) as long as the process that made it, or one it was forked from since, has it mapped,
    whatever pid namespace it lives in; one that nobody has locked is stale. Files of others, and names that do not begin
    with `prefix`, are left alone; so is what cannot be opened. The prefix must be one that only segments of this library
    have: other programs do not lock their files. Raises OSError for a directory that is not there or cannot be listed.
    """
    names = sorted(name for name in os.listdir(directory) if name.startswith(prefix))
    return [name for name in names if _remove_if_stale(os.path.join(directory, name))]


def _remove_if_stale(path: str) -> bool:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        info = os.fstat(descriptor)
        if info.st_uid != os.geteuid() or not stat.S_ISREG(info.st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # While it is locked here nobody can take it for a new one of the same name.
        if os.lstat(path).st_ino != info.st_ino:
            return False
        os.unlink(path)
        return True
    except OSError:  # locked: its owner lives
        return False
    finally:
        os.close(descriptor)


def _create(name: str, directory: str) -> tuple[str, int]:
    """A new file, locked for as long as it is mapped or open: (name, descriptor)."""
    for _ in range(_ATTEMPTS):
        chosen = name or f"/{STALE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        path = os.path.join(directory, chosen.lstrip("/"))
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # A sweep that saw the file before it was locked holds it, to remove it, or has removed it.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink > 0:
                return chosen, descriptor
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(f"cannot lock a new segment in {directory}: somebody removes each of them")


def _unlink(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _share_with_group(descriptor: int, directory: str) -> None:
    group = os.stat(directory).st_gid
    if os.geteuid() == 0 or group in os.getgroups():
        os.fchown(descriptor, -1, group)
    os.fchmod(descriptor, _MODE)  # after the open: the umask does not apply here
