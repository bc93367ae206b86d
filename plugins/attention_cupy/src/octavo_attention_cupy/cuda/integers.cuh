// What the headers of pure integer arithmetic share: functions that host and device compilers both build.
#pragma once

#ifdef __CUDACC__
#define INTEGERS __host__ __device__ __forceinline__
#define INTEGERS_MEMBER static __host__ __device__ __forceinline__
#else
#define INTEGERS static inline
#define INTEGERS_MEMBER static inline
#endif

typedef long long i64;
typedef unsigned int u32;

INTEGERS constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
