"""GPU memory of this process, told to the daemon: handles of allocations and of events, by the CUDA runtime that the
engine has loaded. No module of CUDA is imported, and nothing happens before the first call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

from spectrumkv.v1 import schema_pb2

_HANDLE_BYTES = 64
_SUCCESS = 0
_DRIVER_LIBRARY = "libcuda.so.1"
_RUNTIME_LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
# CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE.
_ATTRIBUTE_IPC_CAPABLE = 10

EXPORT_HINT = (
    "memory of CUDA's virtual memory management cannot be exported by cudaIpcGetMemHandle. In PyTorch that is what "
    "PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF) with expandable_segments:True allocates: set expandable_segments:False "
    "for the worker. In vLLM it is also enable_sleep_mode: start the engine without it"
)


class CudaError(RuntimeError):
    """A call of CUDA failed; `code` is its number."""

    def __init__(self, what: str, code: int, hint: str = "") -> None:
        super().__init__(f"{what} failed with {code}" + (f": {hint}" if hint else ""))
        self.code = code


class CudaRuntime(Protocol):
    """What is needed of CUDA. Each call returns a code, 0 for success; `handle` has 64 bytes to be filled."""

    def ipc_mem_handle(self, handle: ctypes.Array[ctypes.c_char], pointer: int) -> int: ...

    def ipc_event_handle(self, handle: ctypes.Array[ctypes.c_char], event: int) -> int: ...

    def range_of(self, pointer: int) -> tuple[int, int, int]:
        """(code, first address of the allocation, its bytes)."""
        ...

    def is_ipc_capable(self, pointer: int) -> bool | None:
        """Whether the allocation can be exported; None where CUDA does not say."""
        ...


class LoadedCuda:
    """CudaRuntime over the libraries of the process. Raises OSError where they cannot be loaded."""

    def __init__(self) -> None:
        self._runtime = _load(_RUNTIME_LIBRARIES)
        self._driver = _load((_DRIVER_LIBRARY,))

    def ipc_mem_handle(self, handle: ctypes.Array[ctypes.c_char], pointer: int) -> int:
        return int(self._runtime.cudaIpcGetMemHandle(handle, ctypes.c_void_p(pointer)))

    def ipc_event_handle(self, handle: ctypes.Array[ctypes.c_char], event: int) -> int:
        return int(self._runtime.cudaIpcGetEventHandle(handle, ctypes.c_void_p(event)))

    def range_of(self, pointer: int) -> tuple[int, int, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
        return int(code), base.value, size.value

    def is_ipc_capable(self, pointer: int) -> bool | None:
        capable = ctypes.c_int(-1)
        code = self._driver.cuPointerGetAttribute(
            ctypes.byref(capable), _ATTRIBUTE_IPC_CAPABLE, ctypes.c_uint64(pointer)
        )
        return None if code != _SUCCESS or capable.value < 0 else capable.value != 0


def _load(names: tuple[str, ...]) -> ctypes.CDLL:
    errors = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            errors.append(str(error))
    raise OSError("; ".join(errors))


@dataclass(frozen=True)
class ExportedMemory:
    """A part of a GPU allocation, as a segment of a pool names it."""

    handle: bytes
    device_uuid: str
    offset_bytes: int
    size_bytes: int

    def to_proto(self) -> schema_pb2.MemorySegment:
        return schema_pb2.MemorySegment(
            cuda_ipc=schema_pb2.CudaIpcSegment(
                handle=self.handle, device_uuid=self.device_uuid, offset_bytes=self.offset_bytes,
                size_bytes=self.size_bytes,
            )
        )  # fmt: skip


def export_memory(pointer: int, size_bytes: int, device_uuid: str, cuda: CudaRuntime | None = None) -> ExportedMemory:
    """[pointer, pointer + size_bytes) of this process's GPU memory, for example a tensor's data_ptr() and nbytes.

    device_uuid: of the GPU it is on, as nvidia-smi writes it ("GPU-" before torch's device properties' uuid). The memory
    must stay allocated as long as the pool is registered. Raises ValueError where the range is not inside of one
    allocation, CudaError where it cannot be exported: for memory of CUDA's virtual memory management it names the setting
    that made it. `cuda`: for tests.
    """
    cuda = cuda or LoadedCuda()
    if cuda.is_ipc_capable(pointer) is False:
        raise CudaError("exporting GPU memory", 801, EXPORT_HINT)
    code, base, allocated = cuda.range_of(pointer)
    if code != _SUCCESS:
        raise CudaError("cuMemGetAddressRange", code)
    if pointer + size_bytes > base + allocated:
        raise ValueError(
            f"{size_bytes} bytes from {pointer:#x} are not inside of one allocation: it has {allocated} from {base:#x}"
        )
    handle = ctypes.create_string_buffer(_HANDLE_BYTES)
    code = cuda.ipc_mem_handle(handle, base)
    if code != _SUCCESS:
        raise CudaError("cudaIpcGetMemHandle", code, EXPORT_HINT)
    return ExportedMemory(handle.raw, device_uuid, pointer - base, size_bytes)


def export_event(event: int, cuda: CudaRuntime | None = None) -> bytes:
    """The handle of a cudaEvent_t that was made with cudaEventInterprocess and cudaEventDisableTiming, for
    `written_event` of Send, Publish and Advance. Record it behind the writes first. Raises CudaError."""
    cuda = cuda or LoadedCuda()
    handle = ctypes.create_string_buffer(_HANDLE_BYTES)
    code = cuda.ipc_event_handle(handle, event)
    if code != _SUCCESS:
        raise CudaError("cudaIpcGetEventHandle", code, "the event must be interprocess and without timing")
    return handle.raw
