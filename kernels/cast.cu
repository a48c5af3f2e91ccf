// Float8 bytes from tensors, each with its slot's scale; skipped where the bytes are already those.
#include "table.cuh"

struct __align__(16) CastEntry {
    const void* src;
    u8* dst;
    const SlotRecord* scales;
    BytesRecord* record;
    u32* saturated;  // null: not counted
    u32* amax;       // null: not recorded
    u32* arrived;    // blocks of this tensor that are done; 0 between launches
    u64 elements;
    u32 flags, reserved[3];
};
static_assert(sizeof(CastEntry) == 80, "src/cuda/tables.rs");

// Groups that a thread has in flight. A round is what a block has in flight; a tile is some rounds.
#define CAST_GROUPS 4
#define CAST_ROUND (THREADS * 8 * CAST_GROUPS)

struct Seen { u32 most, saturated; };

template <class T, class F, bool EXTRA> G8_FN void cast_group(const typename T::Group& g, u8* dst, float scale, bool count, Seen& seen) {
    u32 codes[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x[4], y[4];
        T::unpack(g, half, x);
#pragma unroll
        for (int k = 0; k < 4; k++) y[k] = x[k] * scale;
        codes[half] = encode4<F>(y);
        if (EXTRA && count) {
            float top = fmaxf(fmaxf(fabsf(y[0]), fabsf(y[1])), fmaxf(fabsf(y[2]), fabsf(y[3])));
            if (top > F::saturation_bound()) {
#pragma unroll
                for (int k = 0; k < 4; k++) seen.saturated += saturates<F>(x[k], y[k]) ? 1u : 0u;
            }
        }
    }
    store8(dst, make_uint2(codes[0], codes[1]));
    if (EXTRA) seen.most = fold<T>(seen.most, g);
}

template <class T, class F, bool EXTRA> G8_FN void cast_tile(const CastEntry& e, u64 begin, u32 tile, float scale) {
    Seen seen = {0, 0};
    const u64 left = e.elements - begin;
    const u32 elements = (u32)(left < tile ? left : tile);
    const u8* src = (const u8*)e.src + begin * T::SIZE;
    u8* dst = e.dst + begin;
    const bool count = EXTRA && e.saturated;
    u32 i = threadIdx.x;
    if (e.flags & VECTOR) {
        u32 from = 0;
#pragma unroll 1
        for (; from + CAST_ROUND <= elements; from += CAST_ROUND) {
            // Straight-line: all loads of the round are under way before the first is used.
            typename T::Group g[CAST_GROUPS];
#pragma unroll
            for (int u = 0; u < CAST_GROUPS; u++) T::load_group(g[u], src, from + (u * THREADS + threadIdx.x) * 8);
#pragma unroll
            for (int u = 0; u < CAST_GROUPS; u++)
                cast_group<T, F, EXTRA>(g[u], dst + from + (u * THREADS + threadIdx.x) * 8, scale, count, seen);
        }
        from += threadIdx.x * 8;
#pragma unroll 1
        for (; from + 8 <= elements; from += THREADS * 8) {
            typename T::Group g;
            T::load_group(g, src, from);
            cast_group<T, F, EXTRA>(g, dst + from, scale, count, seen);
        }
        if (EXTRA) seen.most = T::widen(seen.most);
        i = (elements & ~7u) + threadIdx.x;
    }
#pragma unroll 1
    for (; i < elements; i += THREADS) {
        float x = T::load(src, i), y = x * scale;
        dst[i] = (u8)encode2<F>(y, 0.0f);
        seen.most = max(seen.most, abs_bits(x));
        seen.saturated += saturates<F>(x, y) ? 1u : 0u;
    }
    if (EXTRA) {
        if (e.amax) publish_amax<THREADS>(seen.most, e.amax);
        if (count) publish_count(seen.saturated, e.saturated);
    }
}

template <class T, bool EXTRA> G8_FN void cast_pass(const CastEntry* entries, const Tiles& tiles) {
    const Place at = locate(tiles);
    const CastEntry& e = entries[at.tensor];
    const float scale = e.scales->cast;
    const u32 version = e.scales->version;
    // Every block finds the record as it was before the launch: it changes when all are done.
    if (bits_of(e.record->scale) == bits_of(scale) && e.record->version == version) return;
    if (e.flags & IS_E5M2) cast_tile<T, E5M2, EXTRA>(e, at.begin, tiles.size, scale);
    else cast_tile<T, E4M3, EXTRA>(e, at.begin, tiles.size, scale);
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 last = tiles.first[at.tensor + 1] - tiles.first[at.tensor] - 1;
        if (atomicInc(e.arrived, last) == last) *e.record = BytesRecord{scale, e.scales->cast_inv, version, 0};
    }
}

#define CAST(NAME, T, EXTRA) \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) NAME(const CastEntry* e, Tiles t) { cast_pass<T, EXTRA>(e, t); }
CAST(cast_bf16, BF16, false)
CAST(cast_f16, F16, false)
CAST(cast_f32, F32, false)
CAST(cast_bf16_extra, BF16, true)
CAST(cast_f16_extra, F16, true)
CAST(cast_f32_extra, F32, true)
