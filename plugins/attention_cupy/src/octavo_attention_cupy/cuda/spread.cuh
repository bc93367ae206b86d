// The rotation of `octavo.model.spread` of heads that lie across lanes, an octet of either half a lane, rounded to T16 before and after.
//
// K_DIM = POWER x ODD; a dim is p * ODD + r. Signs, Hadamard's matrix over p, Householder's reflection over r, and the factor. All
// lanes of a warp must call it together; lanes of other heads, and those beyond a head's last dim, may hold anything.
//
// Compiled for: BF16, K_DIM; HALF of it, HOLDERS (lanes that hold a head) and LANES (lanes that it has: the next power of two), of its user.
#pragma once
#include "ptx.cuh"

constexpr int POWER = K_DIM & -K_DIM, ODD = K_DIM / POWER;

INTEGERS constexpr double spread_factor() {  // 1 / (ODD sqrt(POWER))
    double root = ODD;
    int power = POWER;
    for (; power >= 4; power /= 4) root *= 2;
    return 1 / (power == 2 ? root * 1.4142135623730951 : root);
}

constexpr float SPREAD_FACTOR = (float)spread_factor();

// Eight floats at a multiple of 16 bytes of shared memory.
DEVICE void store_eight(float* to, const float (&x)[8]) {
    ((float4*)to)[0] = {x[0], x[1], x[2], x[3]};
    ((float4*)to)[1] = {x[4], x[5], x[6], x[7]};
}

DEVICE void load_eight(float (&x)[8], const float* from) {
    float4 a = ((const float4*)from)[0], b = ((const float4*)from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// Which of p = 8 o to 8 o + 7 have an odd number of neighbouring ones (Rudin and Shapiro's negative signs), as bits 0 to 7.
DEVICE u32 negative(int o) {
    u32 all = __popc(o & o >> 1) & 1 ? 0xff : 0;
    return 0x48 ^ all ^ (o & 1 ? 0xf0 : 0);
}

// Sums and differences of values of a lane whose p differ in bit `bit` of the three of an octet.
template <int bit> DEVICE void add_pairs(float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i & 1 << bit) continue;
        float a = x[i], b = x[i | 1 << bit];
        x[i] = a + b, x[i | 1 << bit] = a - b;
    }
}

// The same in the highest bit, of the halves.
DEVICE void add_halves(float (&x)[2][8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float a = x[0][i], b = x[1][i];
        x[0][i] = a + b, x[1][i] = a - b;
    }
}

// The same of values in two lanes; `second`: this lane's are those with the bit set.
DEVICE void add_across(float (&x)[2][8], int other, bool second) {
    float sign = second ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i / 8][i % 8] = fmaf(x[i / 8][i % 8], sign, __shfl_sync(~0u, x[i / 8][i % 8], other));
}

// K_DIM a power of two. A half of the warp's values is the left operand of a product, which takes in bits 0 and 2 of p and two bits of the
// lane; bit 1 is its upper and lower rows, and other bits of the lane are other rows, so heads stay apart. Exact: the operand is
// T16 anyway, and its partner is ones and minus ones.
DEVICE void spread_by_products(float (&x)[2][8], const u32 (&r)[2][4], int lane) {
    int k = lane % 4, n = lane / 4;
    u32 b = (BF16 ? 0x3f803f80 : 0x3c003c00) ^ (__popc(k & n >> 1) & 1 ? 0x80008000 : 0) ^ (n & 1 ? 0x80000000 : 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        u32 odd = negative(h * HOLDERS + lane % LANES), a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = r[h][i] ^ (odd << (15 - 2 * i) & 0x8000) ^ (odd << (30 - 2 * i) & 0x80000000);
        float low[4] = {}, high[4] = {};
        mma<BF16>(low, a[0], a[1], a[2], a[3], b, b);
        mma<BF16>(high, a[0], a[1], a[2], a[3], b, b ^ 0x80008000);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[h][i] = low[i], x[h][i + 4] = high[i];
        add_pairs<1>(x[h]);
    }
    add_halves(x);
#pragma unroll
    for (int step = 4; step < LANES; step *= 2) add_across(x, lane ^ step, lane & step);
}

// Any K_DIM. Through `shared` of the head, K_DIM + POWER floats, every lane comes to hold two times eight neighbouring p of one r.
DEVICE void spread_by_lanes(float (&x)[2][8], const u32 (&r)[2][4], int lane, float* shared) {
    int holder = lane % LANES, p = holder / ODD * 8, first = p * ODD + holder % ODD;
    bool held = holder < HOLDERS;
    float* sums = shared + K_DIM;
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i / 8][i % 8] = to_float<BF16>(r[i / 8][i / 2 % 4] >> i % 2 * 16);
    if (ODD > 1) {
        if (held) store_eight(shared + holder * 8, x[0]), store_eight(shared + HALF + holder * 8, x[1]);
        __syncwarp();
        for (int i = holder; i < POWER; i += LANES) {
            float sum = 0;
#pragma unroll
            for (int j = 0; j < ODD; ++j) sum += shared[i * ODD + j];
            sums[i] = sum;
        }
        __syncwarp();
        if (held) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                load_eight(x[h], sums + h * POWER / 2 + p);
#pragma unroll
                for (int i = 0; i < 8; ++i) x[h][i] = ODD * shared[h * HALF + first + i * ODD] - 2 * x[h][i];
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        u32 odd = negative(h * POWER / 16 + holder / ODD);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[h][i] = odd >> i & 1 ? -x[h][i] : x[h][i];
        add_pairs<0>(x[h]), add_pairs<1>(x[h]), add_pairs<2>(x[h]);
    }
    add_halves(x);
#pragma unroll
    for (int step = ODD; step < HOLDERS; step *= 2) {
        bool second = holder / step % 2;
        add_across(x, second ? lane - step : lane + step, second);
    }
    if (ODD > 1) {
        __syncwarp();  // all lanes have read
        if (held) {
#pragma unroll
            for (int i = 0; i < 16; ++i) shared[i / 8 * HALF + first + i % 8 * ODD] = x[i / 8][i % 8];
        }
        __syncwarp();
        if (held) load_eight(x[0], shared + holder * 8), load_eight(x[1], shared + HALF + holder * 8);
    }
}

// A lane's octets, two dims a word, which change where `turns`. `shared` as above, used where K_DIM is not a power of two.
DEVICE void spread(u32 (&r)[2][4], int lane, float* shared, bool turns) {
    float x[2][8];
    if constexpr (ODD == 1 && LANES >= 4)
        spread_by_products(x, r, lane);
    else
        spread_by_lanes(x, r, lane, shared);
    if (!turns) return;
#pragma unroll
    for (int i = 0; i < 8; ++i)
        r[i / 4][i % 4] = pack<BF16>(x[i / 4][i % 4 * 2] * SPREAD_FACTOR, x[i / 4][i % 4 * 2 + 1] * SPREAD_FACTOR);
}
