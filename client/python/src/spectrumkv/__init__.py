"""Client of spectrumkvd, the daemon that moves KV caches between inference workers under a byte budget.

Client talks to the daemon; Group says how a cache lies in memory; policy says how its tokens are coded. The messages
are in spectrumkv.v1, the chunk format in spectrumkv.wire.
"""

from spectrumkv import aio, reasons
from spectrumkv.client import Client
from spectrumkv.errors import (
    Aborted, AlreadyExists, Cancelled, DataLoss, DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument,
    NotFound, OutOfRange, PermissionDenied, ResourceExhausted, SpectrumKVError, TransferFailed, Unauthenticated,
    Unavailable, Unimplemented, Unknown, retry,
)  # fmt: skip
from spectrumkv.generations import BlockGenerations
from spectrumkv.groups import BlockTable, Group, block_runs
from spectrumkv.policies import policy, recent_queries, tier_name
from spectrumkv.pools import CudaPool, DaemonOwnedPool, Pool, SharedMemoryPool
from spectrumkv.probe import ProbeModel, round_trip, run_probe
from spectrumkv.segment import SharedSegment, sweep_stale_segments
from spectrumkv.sharding import HeadSlice, head_ranges, head_slices
from spectrumkv.tensors import torch_view

__all__ = [
    "Aborted",
    "AlreadyExists",
    "BlockGenerations",
    "BlockTable",
    "Cancelled",
    "Client",
    "CudaPool",
    "DaemonOwnedPool",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Group",
    "HeadSlice",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "Pool",
    "ProbeModel",
    "ResourceExhausted",
    "SharedMemoryPool",
    "SharedSegment",
    "SpectrumKVError",
    "TransferFailed",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Unknown",
    "aio",
    "block_runs",
    "head_ranges",
    "head_slices",
    "policy",
    "reasons",
    "recent_queries",
    "retry",
    "round_trip",
    "run_probe",
    "sweep_stale_segments",
    "tier_name",
    "torch_view",
]
