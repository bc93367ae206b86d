// What lies between the QKV product and attention, in one kernel: RMS norm of each q and k head, RoPE, and the store of K and V in
// the cache.
//
// A head belongs to LANES neighbouring threads, each of which holds an octet of either half: where RoPE turns all dims, it mixes these two. q
// heads are turned in place, K heads are turned and stored, V heads are stored. Arithmetic is float32; a key is rounded to the
// model's dtype before it is quantised, as if it had been written out. Stores nothing for a negative slot. Never reads the cache.
//
// Compiled for: BF16, KV_BYTES, E5M2, K_DIM, V_DIM (the same), SPREAD: q and k heads, rounded to the model's dtype, are also multiplied by
// the matrix of `octavo.model.spread`.
#include "layout.cuh"
#include "ptx.cuh"

struct PrologueArgs {
    u16* qkv;           // [tokens, heads + 2 kv_heads, K_DIM], dense
    const u16* weight;  // [heads + kv_heads, K_DIM], or null: no norm
    const u16* cosine;  // [tokens, rotary]
    const u16* sine;    // [tokens, rotary], the first half negated
    u8* cache;
    const i64* slots;  // [tokens], block * page + slot
    i64 page_bytes;
    int tokens, page, heads, kv_heads;
    int rotary;  // the first `rotary` dims turn, in pairs (d, d + rotary / 2)
    int wide;    // whether rows of angles, and halves of `rotary`, are multiples of 16 bytes
    float eps;
    float k_scale, v_scale;  // what FP8 values are divided by
};

static_assert(sizeof(PrologueArgs) == ARGS_BYTES, "PrologueArgs of launch.py is another one");
static_assert(K_DIM == V_DIM, "q, k and v heads lie side by side");

constexpr int HALF = K_DIM / 2;
constexpr int HOLDERS = HALF / 8;  // lanes that hold a head
constexpr int LANES = HOLDERS > 8 ? 16 : HOLDERS > 4 ? 8 : HOLDERS > 2 ? 4 : HOLDERS;
constexpr int THREADS = 128;

#if SPREAD
#include "spread.cuh"
#endif

DEVICE void unpack(float (&x)[8], const uint4& r) {
    u32 words[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float<BF16>(words[i / 2] >> i % 2 * 16);
}

// Eight values of a row that starts at `row`: dims d to d + 7. `wide`: as one access.
DEVICE void load_octet(float (&x)[8], const u16* row, int d, bool wide) {
    if (wide) {
        unpack(x, *(const uint4*)(row + d));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = to_float<BF16>(row[d + i]);
    }
}

// The dim that the rotation pairs with d.
DEVICE int partner(int d, int rotary) { return d < rotary / 2 ? d + rotary / 2 : d - rotary / 2; }

// An octet of either half of a row.
struct Octets {
    uint4 first, second;
    DEVICE void load(const u16* row) { first = *(const uint4*)row, second = *(const uint4*)(row + HALF); }
    DEVICE void unpack_to(float (&x)[2][8]) const { unpack(x[0], first), unpack(x[1], second); }
};

// Turn the octets of a head that turns whole.
DEVICE void turn_whole(float (&x)[2][8], const Octets& cosine, const Octets& sine) {
    float c[2][8], s[2][8];
    cosine.unpack_to(c), sine.unpack_to(s);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float first = x[0][i], second = x[1][i];
        x[0][i] = first * c[0][i] + second * s[0][i];
        x[1][i] = second * c[1][i] + first * s[1][i];
    }
}

// Turn the dims of an octet that starts at d. `row` still holds what came in: all of a head is read before any of it is written.
DEVICE void turn(const PrologueArgs& a, float (&x)[8], const u16* row, const u16* weight, float scale, int token, int d) {
    const u16 *cosine = a.cosine + (i64)token * a.rotary, *sine = a.sine + (i64)token * a.rotary;
    if (a.wide) {
        float y[8], w[8], c[8], s[8];
        int other = partner(d, a.rotary);
        load_octet(y, row, other, true);
        if (weight) load_octet(w, weight, other, true);
        load_octet(c, cosine, d, true);
        load_octet(s, sine, d, true);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = x[i] * c[i] + (weight ? y[i] * scale * w[i] : y[i]) * s[i];
    } else {
        for (int i = 0; i < 8; ++i) {
            if (d + i >= a.rotary) continue;
            int other = partner(d + i, a.rotary);
            float y = to_float<BF16>(row[other]);
            if (weight) y = y * scale * to_float<BF16>(weight[other]);
            x[i] = x[i] * to_float<BF16>(cosine[d + i]) + y * to_float<BF16>(sine[d + i]);
        }
    }
}

// An octet of a K or V row to its page.
template <typename Rows> DEVICE void store(u8* start, const PrologueArgs& a, int slot, int octet, const u32 (&r)[4], float scale) {
    if (KV_BYTES == 2) {
        *(uint4*)(start + Rows::at(a.page, slot, octet)) = {r[0], r[1], r[2], r[3]};
    } else {
        u32 half[4];
        if (scale == 1.0f) {  // as it mostly is, and a quotient takes longer than all the rest
#pragma unroll
            for (int i = 0; i < 4; ++i) half[i] = pack_fp8<E5M2>(to_float<BF16>(r[i]), to_float<BF16>(r[i] >> 16));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                half[i] = pack_fp8<E5M2>(__fdiv_rn(to_float<BF16>(r[i]), scale), __fdiv_rn(to_float<BF16>(r[i] >> 16), scale));
        }
        *(uint2*)(start + Rows::at(a.page, slot, octet / 2) + octet % 2 * 8) = {half[0] | half[1] << 16, half[2] | half[3] << 16};
    }
}

// Blocks a multiprocessor for which registers suffice without spilling.
constexpr int BLOCKS = HOLDERS == LANES ? 8 : 7;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) prologue(const __grid_constant__ PrologueArgs a) {
    release_successor();
    wait_for_predecessor();
    int lane = threadIdx.x % LANES, unit = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    int all = a.heads + 2 * a.kv_heads, token = unit / all, head = unit - token * all;
    bool held = token < a.tokens && lane < HOLDERS, turns = head < a.heads + a.kv_heads;
    u16* row = a.qkv + ((i64)token * all + head) * K_DIM;
    const u16* weight = a.weight ? a.weight + head * K_DIM : nullptr;
    bool whole = a.wide && a.rotary == K_DIM;
    int d = lane * 8;
    // All that is read, before any of it is used.
    Octets data = {}, weights, cosine, sine;
    i64 where = -1;
    if (held) {
        data.load(row + d);
        if (turns) {
            if (weight) weights.load(weight + d);
            if (whole) cosine.load(a.cosine + (i64)token * K_DIM + d), sine.load(a.sine + (i64)token * K_DIM + d);
        }
        if (head >= a.heads) where = a.slots[token];
    }
    float x[2][8], scale = 1;
    data.unpack_to(x);
    if (a.weight) {  // of the whole grid: the lanes of a head must meet
        float squares = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) squares += x[i / 8][i % 8] * x[i / 8][i % 8];
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
        scale = __frsqrt_rn(squares / K_DIM + a.eps);
        if (held && turns) {
            float w[2][8];
            weights.unpack_to(w);
#pragma unroll
            for (int i = 0; i < 16; ++i) x[i / 8][i % 8] = x[i / 8][i % 8] * scale * w[i / 8][i % 8];
        }
    }
    if (held && turns) {
        if (whole) {
            turn_whole(x, cosine, sine);
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (h * HALF + d < a.rotary) turn(a, x[h], row, weight, scale, token, h * HALF + d);
        }
    }
    __syncwarp();  // every lane has read what its neighbours are about to overwrite
    u32 r[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) r[i / 4][i % 4] = pack<BF16>(x[i / 4][i % 4 * 2], x[i / 4][i % 4 * 2 + 1]);
#if SPREAD
    __shared__ float exchange[THREADS / LANES][K_DIM + POWER];
    if (__any_sync(~0u, turns)) spread(r, threadIdx.x % 32, exchange[threadIdx.x / LANES], turns);
#endif
    if (!held) return;
    if (head < a.heads) {
#pragma unroll
        for (int h = 0; h < 2; ++h) *(uint4*)(row + h * HALF + d) = {r[h][0], r[h][1], r[h][2], r[h][3]};
        return;
    }
    if (where < 0) return;
    i64 block = where / a.page;
    int slot = (int)(where - block * a.page);
    u8* page = a.cache + block * a.page_bytes;
    if (turns) {
        page += k_offset(a.page, head - a.heads, 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) store<KRows>(page, a, slot, h * HOLDERS + lane, r[h], a.k_scale);
    } else {
        page += v_offset(a.page, head - a.heads - a.kv_heads, 0);
#pragma unroll
        for (int h = 0; h < 2; ++h) store<VRows>(page, a, slot, h * HOLDERS + lane, r[h], a.v_scale);
    }
}
