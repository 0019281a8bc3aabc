#include "tests/cuda/faults.cuh"

namespace spectrumkv::gpu {

template __global__ void MissingBarrier<false>(const FaultArgs);
template __global__ void MissingBarrier<true>(const FaultArgs);
template __global__ void Misaligned<false>(const FaultArgs);
template __global__ void Misaligned<true>(const FaultArgs);
template __global__ void OutOfBounds<false>(const FaultArgs);
template __global__ void OutOfBounds<true>(const FaultArgs);
template __global__ void DivergentMask<false>(const FaultArgs);
template __global__ void DivergentMask<true>(const FaultArgs);
template __global__ void OutsideOfMask<false>(const FaultArgs);
template __global__ void OutsideOfMask<true>(const FaultArgs);

}  // namespace spectrumkv::gpu
