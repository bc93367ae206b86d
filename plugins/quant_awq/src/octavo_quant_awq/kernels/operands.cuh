// How weights become operands of the tensor cores, for narrow.cu. Put between common.cuh and that.
//
// OPERANDS: CENTRED: of x's dtype; offset and zero point are subtracted from every weight. SUMS: of x's dtype; they are subtracted from the products, by sums of x that the
// tensor cores make as well. SCALED: float16 whatever x is, each group of x scaled by a power of two that brings it into range, which loses
// nothing; the inputs of odd pairs are divided by 16 besides, since their nibbles stay where they lie in a word: 5 instructions instead of 7 for 8 weights. The sums of x are
// made as it is read, which pays for few rows.

#define CENTRED (OPERANDS == 0)
#define SUMS (OPERANDS == 1)
#define SCALED (OPERANDS == 2)

#if SCALED
#undef MAGIC
#define MAGIC 0x64006400u // 1024 + q in float16
#endif

// c [16, 8] += a [16, 16] b [16, 8] of what the operands are here.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if SCALED
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    mma(c, a0, a1, a2, a3, b0, b1);
#endif
}

// (w & 0x00f000f0) | magic: 1024 + 16 q in float16.
__device__ __forceinline__ u32 spread_high(u32 w, u32 magic) {
    u32 d;
    asm("lop3.b32 %0, %1, 0x00f000f0, %2, 0xea;" : "=r"(d) : "r"(w), "r"(magic));
    return d;
}

__device__ __forceinline__ void store_shared_16(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Eight inputs, past L1: it may hold what lay there before the kernel in front wrote them.
__device__ __forceinline__ uint4 load_8(const u16* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

#if SCALED
// A chunk of eight inputs of a group, in as many lanes as the group has chunks, all of them in the call: to `to` in float16, scaled; and by the group's first lane to `note`
// what products need: -1024 times the sum of x as it is stored, -sum, both as they were before scaling, and what undoes it. odd: the chunk is of odd pairs.
__device__ __forceinline__ void scale_x(uint4 v, bool odd, bool stored, bool first, u32 to, u32 note) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    float f[8], most = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f[i] = widen(i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xffff, BF16);
        most = fmaxf(most, fabsf(f[i]));
        sum += f[i];
    }
#pragma unroll
    for (int d = 1; d < 16 / SUB; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    const int exponent = min(max((int)(__float_as_uint(most) >> 23), 20), 254); // the largest comes to 2^14 up to 2^15
    const float scale = __uint_as_float((268 - exponent) << 23), factor = odd ? scale / 16 : scale;
    u32 h[4];
#pragma unroll
    for (int i = 0; i < 4; i++) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h[i]) : "f"(f[2 * i + 1] * factor), "f"(f[2 * i] * factor));
    if (stored) store_shared_16(to, h[0], h[1], h[2], h[3]);
    float part = odd ? sum / 16 : sum;
#pragma unroll
    for (int d = 1; d < 16 / SUB; d *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
        part += __shfl_xor_sync(0xffffffffu, part, d);
    }
    if (stored && first)
        store_shared_16(note, __float_as_uint(-1024 * part), __float_as_uint(-sum), (exponent - 14) << 23, 0);
}
#endif
