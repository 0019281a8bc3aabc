"""What a daemon holds: transfers, slots, blocks, mappings, files, sockets, threads; and whether it gave all of it back."""

import os
import pathlib
import time
from dataclasses import dataclass

# gRPC keeps connections to a peer, and threads for a while; what is not given back goes on growing beyond this.
MORE_SOCKETS, MORE_THREADS, MORE_FILES = 24, 12, 4


@dataclass
class Held:
    transfers: int
    slots: int
    blocks: int
    staging_bytes: int
    pools: int
    segments: int
    sockets: int
    files: int
    threads: int
    rss_kib: int


def held(daemon):
    status, pools, metrics = daemon.status(), daemon.pools(), daemon.metrics()
    process = pathlib.Path(f"/proc/{daemon.process.pid}")
    maps = (process / "maps").read_text().splitlines()
    own = f"{daemon.shared_dir}/"
    targets = []
    for name in os.listdir(process / "fd"):
        try:
            targets.append(os.readlink(process / "fd" / name))
        except OSError:
            continue  # closed meanwhile
    told = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Held(
        transfers=status.inflight_transfers,
        slots=sum(slot.slots_used for slot in status.slots),
        blocks=sum(pool.blocks_sending + pool.blocks_receiving for pool in pools),
        staging_bytes=int(sum(v for k, v in metrics.items()
                              if k.startswith("spectrumkv_staging_bytes") and "_used" in k)),  # fmt: skip
        pools=len(pools),
        segments=len({line.split(maxsplit=5)[5] for line in maps if own in line}),
        sockets=sum(target.startswith("socket:") for target in targets),
        files=sum(not target.startswith("socket:") for target in targets),
        threads=int(told["Threads"]),
        rss_kib=int(told["VmRSS"].split()[0]),
    )  # fmt: skip


def _too_much(now, base):
    wrong = [f"{name} {getattr(now, name)}, not 0" for name in ("transfers", "slots", "blocks", "staging_bytes")
             if getattr(now, name)]  # fmt: skip
    wrong += [f"{name} {getattr(now, name)}, not 1" for name in ("pools", "segments") if getattr(now, name) != 1]
    for name, more in (("sockets", MORE_SOCKETS), ("files", MORE_FILES), ("threads", MORE_THREADS)):
        if getattr(now, name) > getattr(base, name) + more:
            wrong.append(f"{name} {getattr(now, name)}, at first {getattr(base, name)}")
    return wrong


def left_over(daemon, base, timeout_s=4.0):
    """What the daemon still holds that it should not, once timeout_s were given to it; and what it holds now."""
    end = time.monotonic() + timeout_s
    while True:
        now = held(daemon)
        wrong = _too_much(now, base)
        if not wrong or time.monotonic() > end:
            return wrong, now
        time.sleep(0.05)
