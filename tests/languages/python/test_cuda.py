"""GPU memory is exported in the way the daemon takes it, and what cannot be exported names the setting. No GPU here: the
calls of CUDA are answered by a stand-in; that the names exist is asked of the real libraries where they are."""

from __future__ import annotations

import ctypes

import pytest

import spectrumkv as skv
from spectrumkv import cuda

BASE, SIZE = 0x7F0000000000, 1 << 21
UUID = "GPU-face0000-0000-0000-0000-000000000000"


class StandIn:
    """One allocation [BASE, BASE + SIZE)."""

    def __init__(self, capable: bool | None = True, handle_code: int = 0, range_code: int = 0) -> None:
        self.capable, self.handle_code, self.range_code = capable, handle_code, range_code
        self.asked: list[int] = []

    def ipc_mem_handle(self, handle: ctypes.Array[ctypes.c_char], pointer: int) -> int:
        self.asked.append(pointer)
        handle.raw = bytes([7]) * 64
        return self.handle_code

    def ipc_event_handle(self, handle: ctypes.Array[ctypes.c_char], event: int) -> int:
        self.asked.append(event)
        handle.raw = bytes([9]) * 64
        return self.handle_code

    def range_of(self, pointer: int) -> tuple[int, int, int]:
        return self.range_code, BASE, SIZE

    def is_ipc_capable(self, pointer: int) -> bool | None:
        return self.capable


def test_a_part_of_an_allocation_names_the_whole_and_its_offset() -> None:
    stand_in = StandIn()
    exported = cuda.export_memory(BASE + 512, 4096, UUID, stand_in)
    assert stand_in.asked == [BASE]
    assert exported == cuda.ExportedMemory(bytes([7]) * 64, UUID, 512, 4096)
    segment = exported.to_proto().cuda_ipc
    assert (segment.handle, segment.device_uuid) == (bytes([7]) * 64, UUID)
    assert (segment.offset_bytes, segment.size_bytes) == (512, 4096)


def test_a_range_beyond_the_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="not inside of one allocation"):
        cuda.export_memory(BASE + 512, SIZE, UUID, StandIn())


@pytest.mark.parametrize("stand_in", [StandIn(capable=False), StandIn(capable=None, handle_code=1)])
def test_memory_that_cannot_be_exported_names_the_settings(stand_in: StandIn) -> None:
    with pytest.raises(cuda.CudaError) as caught:
        cuda.export_memory(BASE, SIZE, UUID, stand_in)
    for words in ("expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF", "enable_sleep_mode"):
        assert words in str(caught.value)


def test_errors_of_cuda_carry_their_number() -> None:
    with pytest.raises(cuda.CudaError) as caught:
        cuda.export_memory(BASE, SIZE, UUID, StandIn(range_code=400))
    assert caught.value.code == 400


def test_an_event_has_a_handle_of_its_own() -> None:
    assert cuda.export_event(5, StandIn()) == bytes([9]) * 64
    with pytest.raises(cuda.CudaError, match="interprocess"):
        cuda.export_event(5, StandIn(handle_code=400))


def test_without_a_driver_the_libraries_are_named() -> None:
    try:
        loaded = cuda.LoadedCuda()
    except OSError as error:
        assert "libcuda" in str(error)
        return
    for name in ("cudaIpcGetMemHandle", "cudaIpcGetEventHandle"):
        assert getattr(loaded._runtime, name)
    for name in ("cuMemGetAddressRange_v2", "cuPointerGetAttribute"):
        assert getattr(loaded._driver, name)


class Registered(skv.CudaPool):
    """Takes the schema instead of a daemon."""

    def __init__(self, groups: list[skv.Group], memories: list[cuda.ExportedMemory]) -> None:
        with pytest.raises(StopIteration):
            super().__init__(None, groups, memories, model="m")  # type: ignore[arg-type]

    def _register(self):  # type: ignore[no-untyped-def]
        raise StopIteration


def test_layers_may_lie_in_allocations_of_their_own() -> None:
    group = skv.Group(layers=(3, 7), heads=2, head_dim=16, block_tokens=4, num_blocks=8, axes="LBPTHD")
    layer_bytes = group.size_bytes // 2
    parts = [cuda.ExportedMemory(bytes([n]) * 64, UUID, 256 * n, layer_bytes) for n in range(2)]
    schema = Registered([group], parts).schema
    assert [s.cuda_ipc.offset_bytes for s in schema.segments] == [0, 256]
    layers = schema.groups[0].layers
    assert [(t.layer, t.k.segment, t.k.offset_bytes) for t in layers] == [(3, 0, 0), (7, 1, 0)]
    assert layers[1].v.offset_bytes == layers[0].v.offset_bytes == 4 * 2 * 16 * 2
    whole = Registered([group], [cuda.ExportedMemory(bytes(64), UUID, 0, group.size_bytes)]).schema
    assert whole.groups[0].layers[1].k.offset_bytes == layer_bytes


def test_memories_that_fit_no_count_are_refused() -> None:
    group = skv.Group(layers=(0, 1, 2), heads=2, head_dim=16, block_tokens=4, num_blocks=8)
    with pytest.raises(ValueError, match="2 memories for 1 groups of 3 layers"):
        skv.CudaPool(None, [group], [cuda.ExportedMemory(bytes(64), UUID, 0, 64)] * 2, model="m")  # type: ignore[arg-type]
