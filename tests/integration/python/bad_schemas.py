"""Schemas that must be refused: what is wrong with each, and what the daemon says."""

import uuid
from dataclasses import dataclass
from typing import Any

import spectrumkv as skv
from spectrumkv.errors import rpc
from spectrumkv.v1 import schema_pb2, worker_service_pb2

SEGMENT_BYTES = 1 << 20


@dataclass(frozen=True)
class Bad:
    """change: what to do to a good schema. field: what the metadata must name, "" where nothing is named."""

    name: str
    change: Any
    code: str
    reason: str
    field: str = ""


def good_schema():
    """Two layers, K and V apart, in a daemon-owned segment with room to spare."""
    group = skv.Group(layers=[0, 1], heads=2, head_dim=16, block_tokens=4, num_blocks=8)
    schema = schema_pb2.PoolSchema(model="m", revision="r", groups=[group.to_proto(0, 0)])
    schema.segments.add().daemon_owned.size_bytes = SEGMENT_BYTES
    return schema


def register(client, schema, **fields):
    request = worker_service_pb2.RegisterPoolRequest(request_id=str(uuid.uuid4()), schema=schema, **fields)
    return rpc(client.worker.RegisterPool, request, 20)


def _group(**fields):
    def change(schema):
        for name, value in fields.items():
            setattr(schema.groups[0], name, value)

    return change


def _k(**fields):
    def change(schema):
        for name, value in fields.items():
            setattr(schema.groups[0].layers[0].k, name, value)

    return change


def _owned(size):
    def change(schema):
        schema.segments[0].daemon_owned.size_bytes = size

    return change


def _same_place(schema):
    schema.groups[0].layers[1].v.CopyFrom(schema.groups[0].layers[0].k)


def _half_over(schema):
    schema.groups[0].layers[0].v.offset_bytes = schema.groups[0].layers[0].k.offset_bytes + 2


def _same_layer(schema):
    schema.groups[0].layers[1].layer = 0


def _second_group(schema):
    schema.groups.add().CopyFrom(schema.groups[0])
    for layer in schema.groups[1].layers:
        layer.layer += 2


def _no_kind(schema):
    schema.segments[0].Clear()


def _cuda(schema):
    schema.segments[0].cuda_ipc.size_bytes = SEGMENT_BYTES
    schema.segments[0].cuda_ipc.handle = bytes(64)


def _generations(schema):
    schema.generations.segment, schema.generations.offset_bytes = 0, SEGMENT_BYTES - 8


def _ranks(schema):
    schema.tensor_parallel_rank, schema.tensor_parallel_size = 4, 4


INVALID = "INVALID_ARGUMENT"
K0, G0 = "groups[0].layers[0].k", "groups[0]"
BAD_SCHEMAS = [
    Bad("no groups", lambda s: s.ClearField("groups"), INVALID, "OUT_OF_RANGE", "schema.groups"),
    Bad("no segments", lambda s: s.ClearField("segments"), INVALID, "OUT_OF_RANGE", "schema.segments"),
    Bad("no layers", lambda s: s.groups[0].ClearField("layers"), INVALID, "INVALID_SCHEMA", f"{G0}.layers (count)"),
    Bad("no dtype", _group(data_type=0), INVALID, "INVALID_SCHEMA", "schema.groups[0].data_type"),
    Bad("fp8", _group(data_type=schema_pb2.DATA_TYPE_FLOAT8_E4M3), "UNIMPLEMENTED", "UNSUPPORTED_DTYPE"),
    Bad("no kind of group", _group(kind=0), INVALID, "INVALID_SCHEMA", "schema.groups[0].kind"),
    Bad("state with V", _group(kind=schema_pb2.GROUP_KIND_OPAQUE_STATE), "INVALID_ARGUMENT", "INVALID_SCHEMA"),
    Bad("heads 0", _group(head_count=0), INVALID, "INVALID_SCHEMA", f"{G0}.head_count"),
    Bad("heads_total 0", _group(heads_total=0), INVALID, "INVALID_SCHEMA", f"{G0}.heads_total"),
    Bad("more heads than all", _group(head_count=3), INVALID, "INVALID_SCHEMA", f"{G0}.head_count"),
    Bad("head_first outside", _group(head_first=1), INVALID, "INVALID_SCHEMA", f"{G0}.head_first"),
    Bad("head_dim 0", _group(head_dim=0), INVALID, "INVALID_SCHEMA", f"{G0}.head_dim"),
    Bad("head_dim 12", _group(head_dim=12), INVALID, "INVALID_SCHEMA", f"{G0}.head_dim"),
    Bad("head_dim 1032", _group(head_dim=1032), INVALID, "INVALID_SCHEMA", f"{G0}.head_dim"),
    Bad("head_dim 2^32-8", _group(head_dim=2**32 - 8), INVALID, "INVALID_SCHEMA", f"{G0}.head_dim"),
    Bad("block_tokens 0", _group(block_tokens=0), INVALID, "INVALID_SCHEMA", f"{G0}.block_tokens"),
    Bad("block_tokens 257", _group(block_tokens=257), INVALID, "INVALID_SCHEMA", f"{G0}.block_tokens"),
    Bad("no blocks", _group(num_blocks=0), INVALID, "INVALID_SCHEMA", f"{G0}.num_blocks"),
    Bad("2^64-1 blocks", _group(num_blocks=2**64 - 1), INVALID, "INVALID_SCHEMA", f"{G0}.num_blocks"),
    Bad("2^31 blocks", _group(num_blocks=2**31), INVALID, "OUT_OF_RANGE", K0),
    Bad("window of 0", _group(kind=schema_pb2.GROUP_KIND_SLIDING_WINDOW), INVALID, "INVALID_SCHEMA",
        f"{G0}.sliding_window_tokens"),
    Bad("huge head count", _group(head_count=2**32 - 1, heads_total=2**32 - 1), INVALID, "INVALID_SCHEMA",
        f"{G0}.heads_total"),
    Bad("segment index", _k(segment=1), INVALID, "INVALID_SCHEMA", f"{K0}.segment"),
    Bad("block stride 0", _k(block_stride_bytes=0), INVALID, "INVALID_SCHEMA", f"{K0}.block_stride_bytes"),
    Bad("token stride 0", _k(token_stride_bytes=0), INVALID, "INVALID_SCHEMA", f"{K0}.token_stride_bytes"),
    Bad("dim stride 0", _k(dim_stride_bytes=0), INVALID, "INVALID_SCHEMA", f"{K0}.dim_stride_bytes"),
    Bad("odd stride", _k(head_stride_bytes=33), INVALID, "INVALID_SCHEMA", f"{K0}.head_stride_bytes"),
    Bad("stride of 2^64-2", _k(block_stride_bytes=2**64 - 2), INVALID, "OUT_OF_RANGE", f"{K0}.block_stride_bytes"),
    Bad("stride beyond", _k(block_stride_bytes=SEGMENT_BYTES // 4), INVALID, "OUT_OF_RANGE", K0),
    Bad("offset beyond", _k(offset_bytes=SEGMENT_BYTES), INVALID, "OUT_OF_RANGE", K0),
    Bad("offset of 2^64-2", _k(offset_bytes=2**64 - 2), INVALID, "OUT_OF_RANGE", K0),
    Bad("odd offset", _k(offset_bytes=1), INVALID, "INVALID_SCHEMA", f"{K0}.offset_bytes"),
    Bad("heads share bytes", _k(head_stride_bytes=16), INVALID, "OVERLAP"),
    Bad("blocks share bytes", _k(block_stride_bytes=64), INVALID, "OVERLAP"),
    Bad("two tensors in one place", _same_place, INVALID, "OVERLAP", "groups[0].layers[1].v"),
    Bad("two tensors half over", _half_over, INVALID, "OVERLAP", "groups[0].layers[0].v"),
    Bad("two groups in one place", _second_group, INVALID, "OVERLAP"),
    Bad("generations over a tensor", lambda s: s.generations.SetInParent(), INVALID, "OVERLAP", "generations"),
    Bad("generations beyond", _generations, INVALID, "OUT_OF_RANGE", "generations.offset_bytes"),
    Bad("a layer twice", _same_layer, INVALID, "INVALID_SCHEMA", "groups[0].layers[1].layer"),
    Bad("layer 65536", lambda s: setattr(s.groups[0].layers[1], "layer", 65536), INVALID, "INVALID_SCHEMA",
        "groups[0].layers[1].layer"),
    Bad("no k", lambda s: s.groups[0].layers[0].ClearField("k"), INVALID, "INVALID_SCHEMA",
        "schema.groups[0].layers[0].k"),
    Bad("no v", lambda s: s.groups[0].layers[0].ClearField("v"), INVALID, "INVALID_SCHEMA",
        "schema.groups[0].layers[0].v"),
    Bad("segment of no kind", _no_kind, INVALID, "INVALID_SCHEMA", "schema.segments[0].kind"),
    Bad("segment of 0 bytes", _owned(0), INVALID, "INVALID_SCHEMA", "segments[0].size_bytes"),
    Bad("segment of 2^64-1 bytes", _owned(2**64 - 1), INVALID, "INVALID_SCHEMA", "segments[0].size_bytes"),
    Bad("segment above the quota", _owned(1 << 45), "RESOURCE_EXHAUSTED", "BYTES_QUOTA"),
    Bad("segment too small", _owned(64), INVALID, "OUT_OF_RANGE"),
    Bad("rank beyond size", _ranks, INVALID, "INVALID_SCHEMA", "schema.tensor_parallel_rank"),
    Bad("long model name", lambda s: setattr(s, "model", "m" * 5000), INVALID, "INVALID_SCHEMA", "schema.model"),
    Bad("CUDA memory of no device", _cuda, INVALID, "INVALID_SCHEMA", "schema.segments[0].cuda_ipc.device_uuid"),
]  # fmt: skip
