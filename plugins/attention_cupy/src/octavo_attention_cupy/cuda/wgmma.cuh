// Hopper's asynchronous matrix products of a warpgroup: the first operand and sums in registers, the second in shared memory as the
// 128-byte swizzle has it. Needs sm_90a.
#pragma once
#include "ptx.cuh"

// Address and strides of an operand, for 128-byte swizzle. Rows of 128 bytes, eight of them 1024 bytes; `group` is the distance
// between groups of eight rows, `panel` between panels of 128 bytes (used only where the operand's rows are the summed axis).
DEVICE u64 matrix_descriptor(u32 address, u32 group, u32 panel) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(panel >> 4) << 16 | (u64)(group >> 4) << 32 | 1ull << 62;
}

// The descriptor of what lies `bytes` (a multiple of 16) further on. Addresses of shared memory never carry into the strides.
DEVICE u64 advance(u64 descriptor, u32 bytes) { return (descriptor >> 32 << 32) | (u32)((u32)descriptor + (bytes >> 4)); }

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending> DEVICE void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory"); }

// The compiler must neither move nor copy registers that a product under way writes or reads.
template <int count> DEVICE void pin(float (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int count> DEVICE void pin(u32 (&x)[count]) {
#pragma unroll
    for (int i = 0; i < count; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

#define F8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define F32(d, i) F8(d, i), F8(d, i + 8), F8(d, i + 16), F8(d, i + 24)
#define R32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R64 \
    R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// d[64 x 128] (+)= a b: a in registers, b in shared memory. The summed axis runs along b's rows of 128 bytes, or, `across`, b has a row for
// each of its values.
template <bool bf16, bool across> DEVICE void product(float (&d)[64], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add) {
    if (bf16)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" R64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
                     : F32(d, 0), F32(d, 32) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)add), "n"((int)across));
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" R64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
                     : F32(d, 0), F32(d, 32) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)add), "n"((int)across));
}

// The same for 64 columns.
template <bool bf16, bool across> DEVICE void product(float (&d)[32], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add) {
    if (bf16)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" R32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
                     : F32(d, 0) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)add), "n"((int)across));
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" R32 "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
                     : F32(d, 0) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"((int)add), "n"((int)across));
}

template <int registers> DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers)); }
template <int registers> DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers)); }
