// What a pass finds in device memory: the records (src/layout.rs), one entry per tensor, and the
// first tile of each tensor. One block works on one tile, so the work is split evenly by bytes
// whatever the tensors' sizes; a tensor without elements still has one tile.
#pragma once
#include "ptx.cuh"

#define THREADS 256

struct SlotRecord { float published, published_inv, cast, cast_inv; u32 version, position, flags, non_finite; };
struct __align__(16) BytesRecord { float scale, scale_inv; u32 version, reserved; };
struct StatusHeader { u32 syncs, refused, disordered, reserved; };
struct ControlRecord {
    u64 step, skipped;
    double norm;
    float max_norm, inverse_loss_scale, factor;
    u32 found_inf, skip_on_found_inf, reserved[5];
};
struct __align__(16) NormRecord { double sum_of_squares, non_finite; };

// Bits of an entry's flags.
static const u32 VECTOR = 1;   // every pointer allows wide accesses
static const u32 IS_E5M2 = 2;  // the float8 format; else E4M3

// ---- which tile ----

struct Tiles {
    const u32* first;  // tensors + 1 words, increasing from 0
    u32 tensors;
    u32 size;  // elements of a tile
};
static_assert(sizeof(Tiles) == 16, "src/cuda/tables.rs");

struct Place {
    u32 tensor;
    u64 begin;  // the tile's first element
};

// A warp compares 32 tensors at a time: one cached load per factor of 32 instead of a word per
// block, which would come from far memory.
G8_FN Place locate(const Tiles& tiles) {
    u32 low = 0, span = tiles.tensors, lane = threadIdx.x & 31;
    while (span > 1) {
        u32 step = (span + 31) / 32;
        bool before = lane * step < span && tiles.first[low + lane * step] <= blockIdx.x;
        u32 hop = (u32)(__popc(__ballot_sync(0xffffffffu, before)) - 1) * step;
        low += hop;
        span = min(step, span - hop);
    }
    return {low, (u64)(blockIdx.x - tiles.first[low]) * tiles.size};
}

// ---- element types ----
//
// A group is eight neighbours as they lie in memory: one or two 16-byte accesses, at an index that
// is a multiple of 8. It is worked on in two halves of four, which keeps few registers busy.

template <int WORDS> struct Words { u32 w[WORDS]; };

G8_FN void load_words(u32* w, const void* p) {
    uint4 v = load16(p);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}
G8_FN void store_words(void* p, const u32* w) { store16(p, make_uint4(w[0], w[1], w[2], w[3])); }

struct F32 {
    enum { SIZE = 4 };
    typedef Words<8> Group;
    static G8_FN void load_group(Group& g, const void* p, u64 i) {
        load_words(g.w, (const float*)p + i);
        load_words(g.w + 4, (const float*)p + i + 4);
    }
    static G8_FN void store_group(const Group& g, void* p, u64 i) {
        store_words((float*)p + i, g.w);
        store_words((float*)p + i + 4, g.w + 4);
    }
    static G8_FN void unpack(const Group& g, int half, float (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 4; k++) x[k] = float_of(g.w[4 * half + k]);
    }
    static G8_FN void pack(Group& g, int half, const float (&x)[4], bool nan) {
#pragma unroll
        for (int k = 0; k < 4; k++) g.w[4 * half + k] = bits_of(nan ? canonical(x[k]) : x[k]);
    }
    static G8_FN float load(const void* p, u64 i) { return ((const float*)p)[i]; }
    static G8_FN void store(void* p, u64 i, float x) { ((float*)p)[i] = canonical(x); }
    // Magnitudes as integers order like values.
    static G8_FN u32 fold(u32 most, u32 word) { return max(most, word & 0x7fffffffu); }
    static G8_FN u32 widen(u32 most) { return most; }
};

// What the two 16-bit types share: two elements to a word.
struct Half {
    enum { SIZE = 2 };
    typedef Words<4> Group;
    static G8_FN void load_group(Group& g, const void* p, u64 i) { load_words(g.w, (const u16*)p + i); }
    static G8_FN void store_group(const Group& g, void* p, u64 i) { store_words((u16*)p + i, g.w); }
    static G8_FN u32 fold(u32 most, u32 word) { return __vmaxu2(most, word & 0x7fff7fffu); }
};

struct BF16 : Half {
    static G8_FN void unpack(const Group& g, int half, float (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            x[2 * k] = float_of(g.w[2 * half + k] << 16);
            x[2 * k + 1] = float_of(g.w[2 * half + k] & 0xffff0000u);
        }
    }
    static G8_FN void pack(Group& g, int half, const float (&x)[4], bool nan) {
#pragma unroll
        for (int k = 0; k < 2; k++)
            g.w[2 * half + k] = nan ? to_bf16(x[2 * k]) | (u32)to_bf16(x[2 * k + 1]) << 16 : pack_bf16(x[2 * k], x[2 * k + 1]);
    }
    static G8_FN float load(const void* p, u64 i) { return from_bf16(((const u16*)p)[i]); }
    static G8_FN void store(void* p, u64 i, float x) { ((u16*)p)[i] = to_bf16(x); }
    static G8_FN u32 widen(u32 most) { return max(most >> 16, most & 0xffffu) << 16; }
};

struct F16 : Half {
    static G8_FN void unpack(const Group& g, int half, float (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            x[2 * k] = from_f16_hard((u16)g.w[2 * half + k]);
            x[2 * k + 1] = from_f16_hard((u16)(g.w[2 * half + k] >> 16));
        }
    }
    static G8_FN float load(const void* p, u64 i) { return from_f16_hard(((const u16*)p)[i]); }
    static G8_FN u32 widen(u32 most) { return abs_bits(from_f16_hard((u16)max(most >> 16, most & 0xffffu))); }
};

template <class T> G8_FN u32 fold(u32 most, const typename T::Group& g) {
#pragma unroll
    for (int k = 0; k < (int)(sizeof(g.w) / 4); k++) most = T::fold(most, g.w[k]);
    return most;
}

// Packing makes NaN canonical only if told that there may be one: a test for four values at once.
G8_FN bool any_nan(const float (&x)[4]) { return x[0] != x[0] || x[1] != x[1] || x[2] != x[2] || x[3] != x[3]; }

// Four float8 codes of scaled values.
template <class F> G8_FN u32 encode4(const float (&y)[4]) {
    return encode2<F>(y[0], y[1]) | encode2<F>(y[2], y[3]) << 16;
}

// ---- reductions over a block ----

// The block's maximum of abs_bits goes to the slot's word. Every thread of the block calls it.
template <int T> G8_FN void publish_amax(u32 abs, u32* slot) {
    __shared__ u32 warps[T / 32];
    abs = __reduce_max_sync(0xffffffffu, abs);
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x / 32] = abs;
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 top = 0;
#pragma unroll
        for (int w = 0; w < T / 32; w++) top = max(top, warps[w]);
        top = amax_word(top);
        // Most blocks find a larger value there and spare the atomic.
        if (top > peek(slot)) atomicMax(slot, top);
    }
}

// The block's sum goes to a counter. Every thread of the block calls it.
G8_FN void publish_count(u32 count, u32* counter) {
    count = __reduce_add_sync(0xffffffffu, count);
    if ((threadIdx.x & 31) == 0 && count != 0) atomicAdd(counter, count);
}
