// W in 16 bits, out of the layout of packing.py: for products of so many rows that a library's kernel pays for it.
//
// out [count, K]: the rows of W [N, K] from `first` on, each weight (q - z) * s computed in float32 and rounded once. A thread makes 32 inputs of one row.
// Blocks along y are blocks of 128 inputs. group_step is 1, or 0 where all inputs are one group.

__device__ __forceinline__ u32 pick(u32 a, u32 b, u32 c, u32 d, int which) { return which < 2 ? which ? b : a : which == 2 ? c : d; }

extern "C" __global__ void dequantise(
    const u32* __restrict__ words, const u16* __restrict__ scales, const u8* __restrict__ zeros, u16* __restrict__ out,
    int first, int count, int N, int K, int group_step) {
    const int unit = blockIdx.x * blockDim.x + threadIdx.x, step = unit % 4, row = unit / 4, block = blockIdx.y;
    const int n = min(first + row, N - 1), rows = (N + 15) / 16 * 16;
    // Four threads have a row; each loads the words of one lane of a tensor core, which belong to four steps, and keeps those of one step of all lanes.
    const uint4 four = __ldcs((const uint4*)words + ((size_t)block * rows + n) * 4 + step);
    u32 from[4], word[4]; // from[d]: of lane step ^ d; word[t]: lane t's inputs 8 p + 2 t and the next, for p of 0 to 3
#pragma unroll
    for (int d = 0; d < 4; d++) from[d] = __shfl_xor_sync(0xffffffffu, pick(four.x, four.y, four.z, four.w, step ^ d), d);
#pragma unroll
    for (int t = 0; t < 4; t++) word[t] = pick(from[0], from[1], from[2], from[3], step ^ t);
    const size_t at = (size_t)(SUB == 1 ? block * group_step : block * SUB + step * SUB / 4) * rows + n / 16 * 16 + n % 8 * 2 + n % 16 / 8;
    const float scale = widen(scales[at], SCALE_BF16);
#if ZEROS
    const int z = zeros[at];
#else
    const int z = 8;
#endif
#pragma unroll
    for (int p = 0; p < 4; p++) {
        u32 pair[4];
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const int low = (int)(word[t] >> 4 * p & 15) - z, high = (int)(word[t] >> (16 + 4 * p) & 15) - z;
            pair[t] = narrow(low * scale) | (u32)narrow(high * scale) << 16;
        }
        const int k = block * 128 + step * 32 + 8 * p;
        if (row < count && k < K) *(uint4*)(out + (size_t)row * K + k) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}
