// What kernels use of HIP's run-time header, declared for a compiler without ROCm: enough to judge masks, ballots,
// inline assembly and local memory, nothing to link or run. warpSize is no constant, as since ROCm 7.0.
#pragma once
#ifdef __cplusplus
#include <cstddef>
#include <cstdint>
#include <cstdio>

#ifndef __noinline__
#define __noinline__ __attribute__((noinline))
#endif
#ifndef __forceinline__
#define __forceinline__ inline __attribute__((always_inline))
#endif
#ifndef __constant__
#define __constant__ __attribute__((constant))
#endif
#ifndef __shared__
#define __shared__ __attribute__((shared))
#endif
#ifndef __launch_bounds__
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))
#endif
#define HIP_DYNAMIC_SHARED(type, name) extern __shared__ type name[];
#define HIP_VERSION 70000000
#define TORCH_HIP_VERSION 700

struct dim3 {
  unsigned x, y, z;
  __host__ __device__ constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct uint3 { unsigned x, y, z; };
extern const __device__ uint3 threadIdx, blockIdx;
extern const __device__ dim3 blockDim, gridDim;
extern const __device__ int warpSize;

#define CROSSTIE_VECTORS(type, name)                                                                                 \
  struct name##1 { type x; };                                                                                        \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                                                           \
  struct name##3 { type x, y, z; };                                                                                  \
  struct alignas(4 * sizeof(type) > 16 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; };                        \
  static inline __host__ __device__ name##2 make_##name##2(type x, type y) { return {x, y}; }                        \
  static inline __host__ __device__ name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }             \
  static inline __host__ __device__ name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CROSSTIE_VECTORS(float, float)
CROSSTIE_VECTORS(double, double)
CROSSTIE_VECTORS(int, int)
CROSSTIE_VECTORS(char, char)
CROSSTIE_VECTORS(unsigned char, uchar)
CROSSTIE_VECTORS(short, short)
CROSSTIE_VECTORS(unsigned short, ushort)
CROSSTIE_VECTORS(long long, longlong)
CROSSTIE_VECTORS(unsigned long long, ulonglong)
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline __host__ __device__ uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline __host__ __device__ uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

typedef struct ihipStream_t* hipStream_t;
typedef struct ihipEvent_t* hipEvent_t;
enum hipError_t { hipSuccess = 0, hipErrorInvalidValue = 1 };
enum hipMemcpyKind { hipMemcpyHostToHost, hipMemcpyHostToDevice, hipMemcpyDeviceToHost, hipMemcpyDeviceToDevice };
enum hipFuncAttribute { hipFuncAttributeMaxDynamicSharedMemorySize = 8 };
hipError_t hipMalloc(void**, size_t);
template <typename T> hipError_t hipMalloc(T**, size_t);
hipError_t hipFree(void*);
hipError_t hipMemcpy(void*, const void*, size_t, hipMemcpyKind);
hipError_t hipMemcpyAsync(void*, const void*, size_t, hipMemcpyKind, hipStream_t = nullptr);
hipError_t hipMemset(void*, int, size_t);
hipError_t hipMemsetAsync(void*, int, size_t, hipStream_t = nullptr);
hipError_t hipGetLastError();
hipError_t hipDeviceSynchronize();
hipError_t hipStreamSynchronize(hipStream_t);
const char* hipGetErrorString(hipError_t);
template <typename T> hipError_t hipFuncSetAttribute(T*, hipFuncAttribute, int);
extern "C" hipError_t __hipPushCallConfiguration(dim3, dim3, size_t = 0, hipStream_t = nullptr);
extern "C" hipError_t hipLaunchKernel(const void*, dim3, dim3, void**, size_t, hipStream_t);

__device__ void __syncthreads();
__device__ int __syncthreads_count(int);
__device__ int __syncthreads_and(int);
__device__ int __syncthreads_or(int);
__device__ void __threadfence();
__device__ void __threadfence_block();
__device__ void __threadfence_system();
__device__ unsigned __lane_id();
__device__ long long clock64();
__device__ long long wall_clock64();
__device__ void abort_device();

template <typename T> __device__ T __shfl(T, int, int width = warpSize);
template <typename T> __device__ T __shfl_up(T, unsigned, int width = warpSize);
template <typename T> __device__ T __shfl_down(T, unsigned, int width = warpSize);
template <typename T> __device__ T __shfl_xor(T, int, int width = warpSize);
__device__ unsigned long long __ballot(int);
__device__ unsigned long long __activemask();
__device__ int __any(int);
__device__ int __all(int);

#define CROSSTIE_WIDE(M) static_assert(sizeof(M) == 8, "crosstie: the mask must have 64 bits")
template <typename M, typename T> __device__ T __shfl_sync(M, T v, int l, int w = warpSize) {
  CROSSTIE_WIDE(M); return __shfl(v, l, w);
}
template <typename M, typename T> __device__ T __shfl_up_sync(M, T v, unsigned l, int w = warpSize) {
  CROSSTIE_WIDE(M); return __shfl_up(v, l, w);
}
template <typename M, typename T> __device__ T __shfl_down_sync(M, T v, unsigned l, int w = warpSize) {
  CROSSTIE_WIDE(M); return __shfl_down(v, l, w);
}
template <typename M, typename T> __device__ T __shfl_xor_sync(M, T v, int l, int w = warpSize) {
  CROSSTIE_WIDE(M); return __shfl_xor(v, l, w);
}
template <typename M> __device__ unsigned long long __ballot_sync(M, int p) { CROSSTIE_WIDE(M); return __ballot(p); }
template <typename M> __device__ int __any_sync(M, int p) { CROSSTIE_WIDE(M); return __any(p); }
template <typename M> __device__ int __all_sync(M, int p) { CROSSTIE_WIDE(M); return __all(p); }
template <typename M> __device__ void __syncwarp(M) { CROSSTIE_WIDE(M); }
__device__ void __syncwarp();
template <typename M, typename T> __device__ unsigned long long __match_any_sync(M, T) { CROSSTIE_WIDE(M); return 0; }

__device__ int __popc(unsigned);
__device__ int __popcll(unsigned long long);
__device__ int __ffs(unsigned);
__device__ int __ffsll(unsigned long long);
__device__ int __clz(int);
__device__ int __clzll(long long);
__device__ unsigned __brev(unsigned);
__device__ unsigned long long __brevll(unsigned long long);
__device__ unsigned __byte_perm(unsigned, unsigned, unsigned);
__device__ unsigned __float_as_uint(float);
__device__ int __float_as_int(float);
__device__ float __int_as_float(int);
__device__ float __uint_as_float(unsigned);
template <typename T> __device__ T __ldg(const T*);

#define CROSSTIE_ATOMIC(type)                                                                                        \
  __device__ type atomicAdd(type*, type);                                                                            \
  __device__ type atomicSub(type*, type);                                                                            \
  __device__ type atomicMax(type*, type);                                                                            \
  __device__ type atomicMin(type*, type);                                                                            \
  __device__ type atomicExch(type*, type);                                                                           \
  __device__ type atomicCAS(type*, type, type);                                                                      \
  __device__ type atomicOr(type*, type);                                                                             \
  __device__ type atomicAnd(type*, type);
CROSSTIE_ATOMIC(int)
CROSSTIE_ATOMIC(unsigned)
CROSSTIE_ATOMIC(unsigned long long)
__device__ float atomicAdd(float*, float);
__device__ double atomicAdd(double*, double);
#endif
