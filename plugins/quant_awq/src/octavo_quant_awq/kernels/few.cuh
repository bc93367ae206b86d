// What narrow.cu and split.cu share: a block's scales in shared memory, and how the sums of its warps meet there. Put between common.cuh and those.
//
// A block has WARPS_N warps side by side, of 16 * ROW_TILES rows of W each, and WARPS_K sets of them that share K by blocks of 128 inputs. A warp's first lane keeps STAGES bulk
// copies of ROW_TILES KB in flight; once all have come and been read, their memory takes the warp's sums, float [token][PITCH].

#define WARPS (WARPS_N * WARPS_K)
#define THREADS (32 * WARPS)
#define TILES (ROW_TILES * WARPS_N)
#define PITCH (16 * ROW_TILES + 4)
#define SLOT (ROW_TILES * 1024)
#define FIRST 1 // stages that begin before x
#define CHUNKS (2 + ZEROS) // of 16 bytes, for scales and zero points of a tile

// Chunk `i` of the scales and zero points of `group` in the block's tiles, tile0 and those after it, to where those of the block's n-th group lie, [group][tile].
__device__ __forceinline__ void copy_scales(
    u32 scales_at, u32 zeros_at, const uint4* scales, const uint4* zeros, int n, int group, int i, int tile0, int tiles, int group_step) {
    const int j = i < 2 * TILES ? i / 2 : i - 2 * TILES;
    if (tile0 + j >= tiles) return;
    const size_t at = (size_t)(SUB == 1 ? group * group_step : group) * tiles + tile0 + j;
    if (i < 2 * TILES)
        copy_16(scales_at + (n * TILES * 2 + i) * 16, scales + at * 2 + i % 2, true);
    else
        copy_16(zeros_at + (n * TILES + j) * 16, zeros + at, true);
}

// A warp's sums of its tiles and of M tokens in eights, to its memory.
template <int EIGHTS>
__device__ __forceinline__ void keep_sums(unsigned char* memory, int M, const float (&acc)[ROW_TILES][EIGHTS][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float* const own = (float*)(memory + threadIdx.x / 32 * STAGES * SLOT);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int j = 0; j < EIGHTS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int token = 8 * j + 2 * t + e % 2;
                if (token < M) own[token * PITCH + 16 * r + g + e / 2 * 8] = acc[r][j][e];
            }
}

// The sums of all that share K, in their order, for the block's outputs at to at + 3.
__device__ __forceinline__ float4 add_sums(const unsigned char* memory, int token, int at) {
    const int offset = at / (16 * ROW_TILES) * STAGES * SLOT + (token * PITCH + at % (16 * ROW_TILES)) * 4;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < WARPS_K; k++) {
        const float4 more = *(const float4*)(memory + offset + k * WARPS_N * STAGES * SLOT);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
    }
    return sum;
}
