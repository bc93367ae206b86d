// Storing a step's K and V in the cache, quantised on the way where the cache is FP8.
//
// One thread makes one chunk of 16 bytes. Writes nothing for a negative slot. Never reads the cache.
//
// Compiled for: BF16, KV_BYTES, E5M2, K_DIM, V_DIM.
#include "layout.cuh"
#include "ptx.cuh"

struct WriteArgs {
    const u16* k;  // [tokens, kv_heads, K_DIM]
    const u16* v;  // [tokens, kv_heads, V_DIM]
    u8* cache;
    const i64* slots;  // [tokens], block * page + slot
    i64 k_token, k_head, v_token, v_head, page_bytes;
    int tokens, page, kv_heads;
    float k_scale, v_scale;  // what FP8 values are divided by
    int wide;                // whether rows of k and v start at multiples of 16 bytes
};

static_assert(sizeof(WriteArgs) == ARGS_BYTES, "WriteArgs of launch.py is another one");

constexpr int CHUNKS = KRows::CHUNKS + VRows::CHUNKS;

// Eight values from `source`.
DEVICE uint4 load_eight(const u16* source, bool wide) {
    if (wide) return *(const uint4*)source;
    u32 r[4];
    for (int i = 0; i < 4; ++i) r[i] = source[2 * i] | (u32)source[2 * i + 1] << 16;
    return {r[0], r[1], r[2], r[3]};
}

DEVICE u32 quantise(u32 x, float scale) {
    return pack_fp8<E5M2>(__fdiv_rn(to_float<BF16>(x), scale), __fdiv_rn(to_float<BF16>(x >> 16), scale));
}

DEVICE u32 quantise(u32 low, u32 high, float scale) { return quantise(low, scale) | quantise(high, scale) << 16; }

extern "C" __global__ void __launch_bounds__(256) write(const __grid_constant__ WriteArgs a) {
    wait_for_predecessor();
    release_successor();
    int i = blockIdx.x * 256 + threadIdx.x;
    int chunk = i % CHUNKS, rest = i / CHUNKS;
    int head = rest % a.kv_heads, token = rest / a.kv_heads;
    if (token >= a.tokens) return;
    i64 where = a.slots[token];
    if (where < 0) return;
    i64 block = where / a.page;
    int slot = (int)(where - block * a.page);
    bool is_key = chunk < KRows::CHUNKS;
    int c = is_key ? chunk : chunk - KRows::CHUNKS;
    const u16* source = is_key ? a.k + token * a.k_token + head * a.k_head : a.v + token * a.v_token + head * a.v_head;
    float scale = is_key ? a.k_scale : a.v_scale;
    source += c * (16 / KV_BYTES);
    uint4 x = load_eight(source, a.wide);
    if (KV_BYTES == 1) {
        uint4 y = load_eight(source + 8, a.wide);
        x = {quantise(x.x, x.y, scale), quantise(x.z, x.w, scale), quantise(y.x, y.y, scale), quantise(y.z, y.w, scale)};
    }
    i64 start = is_key ? k_offset(a.page, head, 0) : v_offset(a.page, head, 0);
    u32 offset = is_key ? KRows::at(a.page, slot, c) : VRows::at(a.page, slot, c);
    *(uint4*)(a.cache + block * a.page_bytes + start + offset) = x;
}
