// What lies between the QKV product and attention, in one kernel: RMS norm of each q and k head, RoPE, and the store of K and V in
// the cache.
//
// A head belongs to LANES neighbouring threads, eight dims each. q heads are turned in place, K heads are turned and stored, V heads
// are stored. Arithmetic is float32; a key is rounded to the model's dtype before it is quantised, as if it had been written out.
// Stores nothing for a negative slot. Never reads the cache.
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

constexpr int OCTETS = K_DIM / 8;
constexpr int LANES = OCTETS > 16 ? 32 : OCTETS > 8 ? 16 : OCTETS > 4 ? 8 : OCTETS > 2 ? 4 : 2;
constexpr int THREADS = 256;

#if SPREAD
#include "spread.cuh"
#endif

// Eight values of a row that starts at `row`: dims d to d + 7. `wide`: as one access.
DEVICE void load_octet(float (&x)[8], const u16* row, int d, bool wide) {
    if (wide) {
        uint4 r = *(const uint4*)(row + d);
        u32 words[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = to_float<BF16>(words[i / 2] >> i % 2 * 16);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = to_float<BF16>(row[d + i]);
    }
}

// The dim that the rotation pairs with d.
DEVICE int partner(int d, int rotary) { return d < rotary / 2 ? d + rotary / 2 : d - rotary / 2; }

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
#pragma unroll
        for (int i = 0; i < 4; ++i)
            half[i] = pack_fp8<E5M2>(__fdiv_rn(to_float<BF16>(r[i]), scale), __fdiv_rn(to_float<BF16>(r[i] >> 16), scale));
        *(uint2*)(start + Rows::at(a.page, slot, octet / 2) + octet % 2 * 8) = {half[0] | half[1] << 16, half[2] | half[3] << 16};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) prologue(const __grid_constant__ PrologueArgs a) {
    release_successor();
    wait_for_predecessor();
    int octet = threadIdx.x % LANES, unit = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
    int all = a.heads + 2 * a.kv_heads, token = unit / all, head = unit - token * all;
    bool held = token < a.tokens && octet < OCTETS, turns = head < a.heads + a.kv_heads;
    u16* row = a.qkv + ((i64)token * all + head) * K_DIM;
    const u16* weight = a.weight ? a.weight + head * K_DIM : nullptr;
    int d = octet * 8;
    float x[8] = {};
    if (held) load_octet(x, row, d, true);
    if (a.weight) {  // of the whole grid: the lanes of a head must meet
        float squares = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) squares += __shfl_xor_sync(~0u, squares, step);
        float scale = __frsqrt_rn(squares / K_DIM + a.eps);
        if (held && turns) {
            float w[8];
            load_octet(w, weight, d, true);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = x[i] * scale * w[i];
            if (d < a.rotary) turn(a, x, row, weight, scale, token, d);
        }
    } else if (held && turns && d < a.rotary) {
        turn(a, x, row, nullptr, 1.0f, token, d);
    }
    __syncwarp();  // every lane has read what its neighbours are about to overwrite
    u32 r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = pack<BF16>(x[2 * i], x[2 * i + 1]);
#if SPREAD
    __shared__ float exchange[THREADS / LANES][K_DIM + POWER];
    if (__any_sync(~0u, turns)) {
        u32 turned[4] = {r[0], r[1], r[2], r[3]};
        spread(turned, threadIdx.x % 32, exchange[threadIdx.x / LANES]);
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = turns ? turned[i] : r[i];
    }
#endif
    if (!held) return;
    if (head < a.heads) {
        *(uint4*)(row + d) = {r[0], r[1], r[2], r[3]};
        return;
    }
    i64 where = a.slots[token];
    if (where < 0) return;
    i64 block = where / a.page;
    int slot = (int)(where - block * a.page);
    u8* page = a.cache + block * a.page_bytes;
    if (turns)
        store<KRows>(page + k_offset(a.page, head - a.heads, 0), a, slot, octet, r, a.k_scale);
    else
        store<VRows>(page + v_offset(a.page, head - a.heads - a.kv_heads, 0), a, slot, octet, r, a.v_scale);
}
