// Half precision as kernels name it; see hip_runtime.h.
#pragma once
#include <hip/hip_runtime.h>
struct __half {
  _Float16 data;
  __half() = default;
  __host__ __device__ __half(float value) : data(static_cast<_Float16>(value)) {}
  __host__ __device__ operator float() const { return data; }
};
typedef __half half;
struct alignas(4) __half2 { __half x, y; };
typedef __half2 half2;
__host__ __device__ float __half2float(__half);
__host__ __device__ __half __float2half(float);
__host__ __device__ __half __float2half_rn(float);
__host__ __device__ float2 __half22float2(__half2);
__host__ __device__ __half2 __float22half2_rn(float2);
__host__ __device__ __half2 __floats2half2_rn(float, float);
__device__ __half __hadd(__half, __half);
__device__ __half __hmul(__half, __half);
__device__ __half2 __hadd2(__half2, __half2);
__device__ __half2 __hmul2(__half2, __half2);
__device__ __half2 __hfma2(__half2, __half2, __half2);
