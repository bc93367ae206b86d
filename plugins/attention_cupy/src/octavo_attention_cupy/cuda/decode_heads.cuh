// The arithmetic of decode: what a warp knows of a segment's query heads, and what a slice of tokens adds to it.
//
// Scores are computed transposed: 16 tokens are the rows of a matrix product and 8 query heads its columns, so that a small
// group of query heads fills the product. FP8 is converted to float16 in registers.
#pragma once
#include "decode_walk.cuh"

// The queries of a segment as the product's second operand, and what a warp has summed so far. Lane 4g + t: query head g of
// a tile in `q`, heads 2t and 2t + 1 in all else.
struct Heads {
    u32 q[K_STEPS][N_TILES][2];
    float scale[N_TILES][2];
    float top[N_TILES][2];       // largest score so far, in powers of two
    float sum[N_TILES][2];       // of this lane's tokens only
    float acc[V_TILES][N_TILES][4];
};

// Start loading a segment's queries; nothing else of `h` is touched.
DEVICE void load_queries(const DecodeArgs& a, const Walk& walk, Heads& h) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int first = walk.segment.head % a.pieces * HEADS, kv_head = walk.segment.head / a.pieces;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        int head = first + n * 8 + g;
        const u16* q = a.q + walk.row.token * a.q_token + (kv_head * a.group + head) * a.q_head;
        bool held = head < a.group;
#pragma unroll
        for (int s = 0; s < K_STEPS; ++s) {
            // The order of the summed dims is free, as long as K has the same: FP8 K gives dims 4t to 4t + 3 to lane t.
            uint2 x = {0, 0};
            if (held && FP8)
                x = *(const uint2*)(q + 16 * s + 4 * t);
            else if (held)
                x = {*(const u32*)(q + 16 * s + 2 * t), *(const u32*)(q + 16 * s + 2 * t + 8)};
            h.q[s][n][0] = x.x;
            h.q[s][n][1] = x.y;
        }
    }
}

// Queries have come: make them the product's operand, and forget the sums of the segment before.
DEVICE void start_segment(const DecodeArgs& a, Heads& h) {
    int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        h.scale[n][0] = h.scale[n][1] = a.scale;
        if (BF16 && FP8) {
            // A bfloat16 query as float16: divided by its largest value, so that it cannot overflow.
            float size = 0;
#pragma unroll
            for (int s = 0; s < K_STEPS; ++s)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    size = fmaxf(size, fmaxf(fabsf(to_float<true>(h.q[s][n][i])), fabsf(to_float<true>(h.q[s][n][i] >> 16))));
            size = fmaxf(size, __shfl_xor_sync(~0u, size, 1));
            size = fmaxf(size, __shfl_xor_sync(~0u, size, 2));
            size = size > 0 ? size : 1.0f;
            float inverse = 1.0f / size;
#pragma unroll
            for (int s = 0; s < K_STEPS; ++s)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    u32 x = h.q[s][n][i];
                    h.q[s][n][i] = pack_f16(to_float<true>(x) * inverse, to_float<true>(x >> 16) * inverse);
                }
            h.scale[n][0] *= __shfl_sync(~0u, size, 8 * t);
            h.scale[n][1] *= __shfl_sync(~0u, size, 8 * t + 4);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) h.top[n][i] = NEGATIVE_INFINITY, h.sum[n][i] = 0;
#pragma unroll
        for (int v = 0; v < V_TILES; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) h.acc[v][n][i] = 0;
    }
}

// Scores of 16 tokens: lane 4g + t gets tokens g and g + 8 of heads 2t, 2t + 1.
DEVICE void scores(float (&s)[N_TILES][4], const Heads& h, u32 keys, int tile) {
    int lane = threadIdx.x % 32;
    int row = tile * 16 + lane % 16, half = lane / 16;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
    if (!FP8) {
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) {
            u32 r[4];
            load_matrices(r, keys + KRows::at(SLICE, row, 2 * k + half));
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) mma<BF16_PRODUCT>(s[n], r[0], r[1], r[2], r[3], h.q[k][n][0], h.q[k][n][1]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < K_STEPS; k += 2) {
            u32 r[4];
            load_matrices(r, keys + KRows::at(SLICE, row, min(k + half, K_STEPS - 1)));
#pragma unroll
            for (int j = 0; j < 2 && k + j < K_STEPS; ++j) {
                u32 x = r[2 * j], y = r[2 * j + 1];
                u32 a0 = fp8_to_f16<E5M2>(x), a1 = fp8_to_f16<E5M2>(y), a2 = fp8_to_f16<E5M2>(x >> 16), a3 = fp8_to_f16<E5M2>(y >> 16);
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) mma<false>(s[n], a0, a1, a2, a3, h.q[k + j][n][0], h.q[k + j][n][1]);
            }
        }
    }
}

// acc += V^T p over 16 tokens. Rows of a product are dims: g and g + 8 of a tile, or, of FP8, 2g and 2g + 1.
DEVICE void add_values(Heads& h, const u32 (&p)[N_TILES][2], u32 values, int tile) {
    int lane = threadIdx.x % 32;
    if (!FP8) {
        int row = tile * 16 + lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) {
            u32 r[4];
            load_matrices_transposed(r, values + VRows::at(SLICE, row, 2 * v + half));
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) mma<BF16_PRODUCT>(h.acc[v][n], r[0], r[1], r[2], r[3], p[n][0], p[n][1]);
        }
    } else {
        int row = tile * 16 + lane % 16, half = lane / 16;
#pragma unroll
        for (int v = 0; v < V_TILES; v += 2) {
            u32 r[4];
            load_matrices_transposed(r, values + VRows::at(SLICE, row, min(v + half, V_TILES - 1)));
#pragma unroll
            for (int j = 0; j < 2 && v + j < V_TILES; ++j) {
                // Bytes (token, dim): (2t, 2g), (2t, 2g + 1), (2t + 1, 2g), (2t + 1, 2g + 1). Pair up the tokens.
                u32 x = __byte_perm(r[2 * j], 0, 0x3120), y = __byte_perm(r[2 * j + 1], 0, 0x3120);
                u32 a0 = fp8_to_f16<E5M2>(x), a1 = fp8_to_f16<E5M2>(x >> 16), a2 = fp8_to_f16<E5M2>(y), a3 = fp8_to_f16<E5M2>(y >> 16);
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) mma<false>(h.acc[v + j][n], a0, a1, a2, a3, p[n][0], p[n][1]);
            }
        }
    }
}

// One slice in shared memory, whose first token is `token`; only tokens in [first, stop) count.
DEVICE void attend(const DecodeArgs& a, Heads& h, u32 stage, int token, int first, int stop) {
    int lane = threadIdx.x % 32, g = lane / 4;
    u32 values = stage + SLICE * KRows::BYTES;
    bool masked = token < first || token + SLICE > stop;
    if (masked) {
        // Whatever lies there is not ours and may be NaN, which a weight of zero would not silence.
        for (int r = 0; r < SLICE; ++r)
            if (token + r < first || token + r >= stop)
                for (int c = lane; c < VRows::CHUNKS; c += 32) zero_16_bytes(values + VRows::at(SLICE, r, c));
        __syncwarp();
    }
    float s[M_TILES][N_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        scores(s[m], h, stage, m);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x = s[m][n][i] * h.scale[n][i % 2];
                if (SOFTCAP) x = a.softcap * tanh_exact(x);
                int at = token + m * 16 + g + i / 2 * 8;
                if (masked && (at < first || at >= stop)) x = NEGATIVE_INFINITY;
                s[m][n][i] = x;
            }
    }
    // The maximum seldom moves after the first slices: only when it does, lanes compare and the sums are rescaled.
    float top[N_TILES][2];
    bool higher = false;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            top[n][i] = fmaxf(s[0][n][i], s[0][n][i + 2]);
#pragma unroll
            for (int m = 1; m < M_TILES; ++m) top[n][i] = fmaxf(top[n][i], fmaxf(s[m][n][i], s[m][n][i + 2]));
            higher |= top[n][i] > h.top[n][i];
        }
    if (__any_sync(~0u, higher)) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float x = top[n][i];
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
                x = fmaxf(x, h.top[n][i]);
                float keep = x == h.top[n][i] ? 1.0f : exp2_fast(h.top[n][i] - x);
                h.top[n][i] = x;
                h.sum[n][i] *= keep;
#pragma unroll
                for (int v = 0; v < V_TILES; ++v) h.acc[v][n][i] *= keep, h.acc[v][n][i + 2] *= keep;
            }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        u32 p[N_TILES][2];
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            float e[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float base = h.top[n][i % 2];
                e[i] = exp2_fast(s[m][n][i] - (base == NEGATIVE_INFINITY ? 0.0f : base));
                h.sum[n][i % 2] += e[i];
            }
            p[n][0] = transpose_matrix(pack<BF16_PRODUCT>(e[0], e[1]));
            p[n][1] = transpose_matrix(pack<BF16_PRODUCT>(e[2], e[3]));
        }
        add_values(h, p, values, m);
    }
#if HOPPER
    if (masked) fence_copy_engine();
#endif
}
