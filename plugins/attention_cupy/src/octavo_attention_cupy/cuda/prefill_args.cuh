// What both prefill kernels are given.
#pragma once
#include "ptx.cuh"

struct PrefillTile {
    int token, tokens, position;  // first new token, how many, the first one's position
    int table_row, end;           // tokens in the cache
    int head;                     // KV head: of an item of the Hopper kernel
    int unused[2];
};

struct PrefillArgs {
    const u16* q;              // [tokens, heads, K_DIM]
    u16* out;                  // [tokens, heads, V_DIM]
    float* lse;                // [tokens, heads], or null
    const u8* cache;           // [blocks, page_bytes]
    const int* table;          // [table rows, columns]
    const PrefillTile* tiles;  // the portable kernel: [blocks in x], longest first; the Hopper kernel: block after block
    const int* starts;         // the Hopper kernel: block b has tiles [starts[b], starts[b + 1])
    const float* sinks;        // [heads], or null
    i64 q_token, q_head, out_token, out_head, lse_token, table_row, page_bytes;  // strides, in elements but the last
    int page, kv_heads, group, window;  // window 0: none
    float scale;               // scores times log2(e); with a soft-cap, scores over the cap
    float softcap;             // the cap times log2(e)
    float v_scale;
};

static_assert(sizeof(PrefillArgs) == ARGS_BYTES, "PrefillArgs of launch.py is another one");
