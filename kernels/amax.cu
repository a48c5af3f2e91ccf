// The largest magnitude of each tensor, by unsigned MAX into its slot's word.
#include "table.cuh"

struct __align__(16) AmaxEntry {
    const void* src;
    u32* slot;
    u64 elements;
    u32 flags, reserved;
};
static_assert(sizeof(AmaxEntry) == 32, "src/cuda/tables.rs");

#define AMAX_TILE_BYTES 16384

template <class T> G8_FN void amax_pass(const AmaxEntry* entries, const Tiles& tiles) {
    const u64 tile = AMAX_TILE_BYTES / T::SIZE, wide = 16 / T::SIZE;
    const Place at = locate(tiles);
    const AmaxEntry& e = entries[at.tensor];
    u64 left = e.elements - at.begin;
    const u8* src = (const u8*)e.src + at.begin * T::SIZE;
    u32 most = 0;
    if (left >= tile && (e.flags & VECTOR)) {
        u32 w[AMAX_TILE_BYTES / 4 / THREADS];
#pragma unroll
        for (int u = 0; u < AMAX_TILE_BYTES / 16 / THREADS; u++) load_words(w + 4 * u, src + (u * THREADS + threadIdx.x) * 16);
#pragma unroll
        for (int k = 0; k < AMAX_TILE_BYTES / 4 / THREADS; k++) most = T::fold(most, w[k]);
    } else {
        u32 count = (u32)(left < tile ? left : tile), done = 0;
        if (e.flags & VECTOR) {
            u32 groups = count / wide;
            for (u32 g = threadIdx.x; g < groups; g += THREADS) {
                u32 w[4];
                load_words(w, src + g * 16);
                most = T::fold(T::fold(T::fold(T::fold(most, w[0]), w[1]), w[2]), w[3]);
            }
            done = groups * wide;
        }
        for (u32 i = done + threadIdx.x; i < count; i += THREADS)
            most = T::fold(most, T::SIZE == 4 ? ((const u32*)src)[i] : (u32)((const u16*)src)[i]);
    }
    publish_amax<THREADS>(T::widen(most), e.slot);
}

extern "C" {
__global__ void __launch_bounds__(THREADS) amax_bf16(const AmaxEntry* e, Tiles t) { amax_pass<BF16>(e, t); }
__global__ void __launch_bounds__(THREADS) amax_f16(const AmaxEntry* e, Tiles t) { amax_pass<F16>(e, t); }
__global__ void __launch_bounds__(THREADS) amax_f32(const AmaxEntry* e, Tiles t) { amax_pass<F32>(e, t); }
}
