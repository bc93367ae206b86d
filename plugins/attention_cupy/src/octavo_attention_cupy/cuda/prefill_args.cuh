// What both prefill kernels are given.
#pragma once
#include "ptx.cuh"

struct PrefillTile {
    int token, tokens, position, table_row, end, unused[3];  // first new token, how many, its position; tokens in the cache
};

struct PrefillArgs {
    const u16* q;              // [tokens, heads, K_DIM]
    u16* out;                  // [tokens, heads, V_DIM]
    float* lse;                // [tokens, heads], or null
    const u8* cache;           // [blocks, page_bytes]
    const int* table;          // [table rows, columns]
    const PrefillTile* tiles;  // [count], longest first
    const float* sinks;        // [heads], or null
    i64 q_token, q_head, out_token, out_head, lse_token, table_row, page_bytes;  // strides, in elements but the last
    int page, kv_heads, group, window;  // window 0: none
    float scale;               // scores times log2(e); with a soft-cap, scores over the cap
    float softcap;             // the cap times log2(e)
    float v_scale;
    int count;
};

static_assert(sizeof(PrefillArgs) == ARGS_BYTES, "PrefillArgs of launch.py is another one");
