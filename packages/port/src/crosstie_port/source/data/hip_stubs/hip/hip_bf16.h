// bfloat16 as kernels name it; see hip_runtime.h.
#pragma once
#include <hip/hip_runtime.h>
struct __hip_bfloat16 {
  unsigned short data;
  __hip_bfloat16() = default;
  __host__ __device__ __hip_bfloat16(float);
  __host__ __device__ operator float() const;
};
struct alignas(4) __hip_bfloat162 { __hip_bfloat16 x, y; };
__host__ __device__ float __bfloat162float(__hip_bfloat16);
__host__ __device__ __hip_bfloat16 __float2bfloat16(float);
__host__ __device__ __hip_bfloat16 __float2bfloat16_rn(float);
