// What ring.cu and warpgroup.cu share: x by tensor copies, and how blocks of a cluster add up the sums of sixteen outputs. Put between common.cuh and those.

struct alignas(64) TensorMap {
    u64 opaque[16];
};

// x of TOKENS tokens from `token` on: 64 inputs from k on.
__device__ __forceinline__ void copy_x(u32 to, const TensorMap* map, int k, int token, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(map), "r"(k), "r"(token), "r"(barrier) : "memory");
}

// For what other blocks of the cluster have pushed.
__device__ __forceinline__ void wait_cluster(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
                 :: "r"(barrier), "r"(parity) : "memory");
}

// A warp's sums, in the order of write_sums, to the piece of COUNT * 128 bytes at address `to` of block `rank` of the cluster, where `barrier` counts them.
template <int COUNT>
__device__ __forceinline__ void push_sums(u32 to, const float (&sum)[COUNT], u32 barrier, u32 rank) {
#pragma unroll
    for (int j = 0; j < COUNT; j += 4)
        push_peer(to + j * 128 + threadIdx.x % 32 * 16, make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]), barrier, rank);
}

// The same to a piece of this block.
template <int COUNT>
__device__ __forceinline__ void keep_sums(u32 to, const float (&sum)[COUNT]) {
#pragma unroll
    for (int j = 0; j < COUNT; j += 4)
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                     :: "r"(to + j * 128 + threadIdx.x % 32 * 16), "f"(sum[j]), "f"(sum[j + 1]), "f"(sum[j + 2]), "f"(sum[j + 3]) : "memory");
}

// `count` pieces of this block, one after the other from address `at` on, added up in that order.
template <int COUNT>
__device__ __forceinline__ void add_sums(float (&sum)[COUNT], u32 at, int count) {
    for (int i = 0; i < count; i++)
#pragma unroll
        for (int j = 0; j < COUNT; j += 4) {
            const uint4 v = load_shared_16(at + (i * COUNT + j) * 128 + threadIdx.x % 32 * 16);
            sum[j] += __uint_as_float(v.x), sum[j + 1] += __uint_as_float(v.y), sum[j + 2] += __uint_as_float(v.z), sum[j + 3] += __uint_as_float(v.w);
        }
}
