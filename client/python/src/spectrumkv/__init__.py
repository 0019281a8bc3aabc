"""Client of spectrumkvd, the daemon that moves KV caches between inference workers under a byte budget.

Client talks to the daemon; Group says how a cache lies in memory; policy says how its tokens are coded. The messages
are in spectrumkv.v1, the chunk format in spectrumkv.wire.
"""

from spectrumkv.client import Client
from spectrumkv.errors import SpectrumKVError, TransferFailed, retry
from spectrumkv.generations import BlockGenerations
from spectrumkv.groups import Group, block_runs
from spectrumkv.policies import policy, recent_queries, tier_name
from spectrumkv.pools import CudaPool, DaemonOwnedPool, Pool, SharedMemoryPool
from spectrumkv.probe import ProbeModel, round_trip, run_probe
from spectrumkv.segment import SharedSegment, sweep_stale_segments

__all__ = [
    "BlockGenerations",
    "Client",
    "CudaPool",
    "DaemonOwnedPool",
    "Group",
    "Pool",
    "ProbeModel",
    "SharedMemoryPool",
    "SharedSegment",
    "SpectrumKVError",
    "TransferFailed",
    "block_runs",
    "policy",
    "recent_queries",
    "retry",
    "round_trip",
    "run_probe",
    "sweep_stale_segments",
    "tier_name",
]
