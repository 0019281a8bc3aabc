// What a chunk begins with, for all that write one.
#pragma once

#include <cstdint>

#include "kernels/codec/backend.h"
#include "kernels/codec/cell_ops.h"

namespace spectrumkv {

// The header of a chunk of chunk_bytes; its crc32c is the checksum so far, to be continued with the body.
ChunkHeader HeaderOf(const ChunkDims& dims, const ChunkIdentity& identity, uint64_t chunk_bytes);

// Writes the header of a chunk whose body is complete, with the checksum of both.
void SealChunk(const ChunkDims& dims, const ChunkIdentity& identity, uint64_t chunk_bytes, uint8_t* chunk);

// Values of these cells that are not finite.
uint64_t CountNonFinite(const CellsIn& cells);

}  // namespace spectrumkv
