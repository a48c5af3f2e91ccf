// One value in, one value out: decode, divide, accumulate. In place is allowed where types agree.
#include "table.cuh"

struct __align__(16) DecodeEntry {
    const u8* src;
    const BytesRecord* record;
    void* dst;
    u64 elements;
    u32 flags, reserved[3];
};
static_assert(sizeof(DecodeEntry) == 48, "src/cuda/tables.rs");

struct __align__(16) UnaryEntry {
    const void* src;
    void* dst;
    u64 elements;
    u32 flags;
    float divisor;
};
static_assert(sizeof(UnaryEntry) == 32, "src/cuda/tables.rs");

#define GROUPS 2  // groups of 8 that a thread has in flight
#define UNARY_ROUND (THREADS * 8 * GROUPS)
#define DECODE_GROUPS 4
#define DECODE_ROUND (THREADS * 8 * DECODE_GROUPS)

template <class F, class D> G8_FN void decode_tile(const DecodeEntry& e, u64 begin, u32 tile) {
    const float scale = e.record->scale_inv;
    const u64 end = begin + tile < e.elements ? begin + tile : e.elements;
    for (u64 base = begin; base < end; base += DECODE_ROUND) {
        if ((e.flags & VECTOR) && base + DECODE_ROUND <= end) {
            uint2 codes[DECODE_GROUPS];
#pragma unroll
            for (int u = 0; u < DECODE_GROUPS; u++) codes[u] = load8(e.src + base + (u * THREADS + threadIdx.x) * 8);
#pragma unroll
            for (int u = 0; u < DECODE_GROUPS; u++) {
                typename D::Group g;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 word = half ? codes[u].y : codes[u].x;
                    float x[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) x[k] = decode<F>((u8)(word >> (8 * k))) * scale;
                    D::pack(g, half, x, any_nan(x));
                }
                D::store_group(g, e.dst, base + (u * THREADS + threadIdx.x) * 8);
            }
        } else {
            const u64 stop = base + DECODE_ROUND < end ? base + DECODE_ROUND : end;
            for (u64 i = base + threadIdx.x; i < stop; i += THREADS) D::store(e.dst, i, decode<F>(e.src[i]) * scale);
        }
    }
}

template <class D> G8_FN void decode_pass(const DecodeEntry* entries, const Tiles& tiles) {
    const Place at = locate(tiles);
    const DecodeEntry& e = entries[at.tensor];
    if (e.flags & IS_E5M2) decode_tile<E5M2, D>(e, at.begin, tiles.size);
    else decode_tile<E4M3, D>(e, at.begin, tiles.size);
}

struct Divide {
    static const bool READS_DST = false;
    static G8_FN float of(float x, float, float divisor) { return x / divisor; }
};
struct Accumulate {
    static const bool READS_DST = true;
    static G8_FN float of(float x, float sum, float) { return sum + x; }
};

template <class OP, class S, class D> G8_FN void unary_pass(const UnaryEntry* entries, const Tiles& tiles) {
    const Place at = locate(tiles);
    const UnaryEntry& e = entries[at.tensor];
    const u64 end = at.begin + tiles.size < e.elements ? at.begin + tiles.size : e.elements;
    for (u64 base = at.begin; base < end; base += UNARY_ROUND) {
        if ((e.flags & VECTOR) && base + UNARY_ROUND <= end) {
            typename S::Group src[GROUPS];
            typename D::Group dst[GROUPS];
#pragma unroll
            for (int u = 0; u < GROUPS; u++) {
                const u64 i = base + (u * THREADS + threadIdx.x) * 8;
                S::load_group(src[u], e.src, i);
                if (OP::READS_DST) D::load_group(dst[u], e.dst, i);
            }
#pragma unroll
            for (int u = 0; u < GROUPS; u++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float x[4], y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    S::unpack(src[u], half, x);
                    if (OP::READS_DST) D::unpack(dst[u], half, y);
#pragma unroll
                    for (int k = 0; k < 4; k++) x[k] = OP::of(x[k], y[k], e.divisor);
                    D::pack(dst[u], half, x, any_nan(x));
                }
                D::store_group(dst[u], e.dst, base + (u * THREADS + threadIdx.x) * 8);
            }
        } else {
            const u64 stop = base + UNARY_ROUND < end ? base + UNARY_ROUND : end;
            for (u64 i = base + threadIdx.x; i < stop; i += THREADS)
                D::store(e.dst, i, OP::of(S::load(e.src, i), OP::READS_DST ? D::load(e.dst, i) : 0.0f, e.divisor));
        }
    }
}

extern "C" {
__global__ void __launch_bounds__(THREADS) decode_bf16(const DecodeEntry* e, Tiles t) { decode_pass<BF16>(e, t); }
__global__ void __launch_bounds__(THREADS) decode_f32(const DecodeEntry* e, Tiles t) { decode_pass<F32>(e, t); }
__global__ void __launch_bounds__(THREADS) divide_bf16_bf16(const UnaryEntry* e, Tiles t) { unary_pass<Divide, BF16, BF16>(e, t); }
__global__ void __launch_bounds__(THREADS) divide_bf16_f32(const UnaryEntry* e, Tiles t) { unary_pass<Divide, BF16, F32>(e, t); }
__global__ void __launch_bounds__(THREADS) divide_f32_bf16(const UnaryEntry* e, Tiles t) { unary_pass<Divide, F32, BF16>(e, t); }
__global__ void __launch_bounds__(THREADS) divide_f32_f32(const UnaryEntry* e, Tiles t) { unary_pass<Divide, F32, F32>(e, t); }
__global__ void __launch_bounds__(THREADS) accumulate_bf16(const UnaryEntry* e, Tiles t) { unary_pass<Accumulate, BF16, F32>(e, t); }
__global__ void __launch_bounds__(THREADS) accumulate_f32(const UnaryEntry* e, Tiles t) { unary_pass<Accumulate, F32, F32>(e, t); }
}
