"""Shared memory that a worker owns."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref

import numpy as np
from numpy.typing import NDArray

SHM_DIRECTORY = "/dev/shm"
_MODE = 0o660


class SharedSegment:
    """Creates the file `name` (a random one where empty) of `size_bytes`, fully populated, in `directory`.

    In /dev/shm it is a POSIX shared memory object; `name` is then as for shm_open, "/...".

    The file has mode 0660 and the group of its directory, where this process may give it that one, so that a daemon of
    another user and the same group can open it. Every page is written once: a hole would be filled by whoever touches
    it first, and the daemon refuses segments with holes.

    `memory` is uint8 [size_bytes]. The name is removed by close(); the memory itself lives as long as someone has it
    mapped. Not thread-safe.
    """

    def __init__(self, size_bytes: int, name: str = "", directory: str = SHM_DIRECTORY) -> None:
        self.name = name or f"/spectrumkv-{os.getpid()}-{secrets.token_hex(4)}"
        self.size_bytes = size_bytes
        path = os.path.join(directory, self.name.lstrip("/"))
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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


def _unlink(path: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _share_with_group(descriptor: int, directory: str) -> None:
    group = os.stat(directory).st_gid
    if os.geteuid() == 0 or group in os.getgroups():
        os.fchown(descriptor, -1, group)
    os.fchmod(descriptor, _MODE)  # after the open: the umask does not apply here
