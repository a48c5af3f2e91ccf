// The gradient norm in a fixed order (src/layout.rs), and what it decides about the step.
#include "table.cuh"

struct __align__(16) NormEntry {
    const void* src;
    NormRecord* tiles;
    u64 elements;
    u32 flags, reserved;
};
static_assert(sizeof(NormEntry) == 32, "src/cuda/tables.rs");

#define NORM_TILE 8192
#define NORM_LANES 256
#define NORM_FINAL_LANES 1024

// s[i] += s[i + h] for h halving down to 1; the sum is returned to thread 0. The last steps stay in
// one warp.
template <int LANES> G8_FN double halve(double* s) {
#pragma unroll 1
    for (u32 h = LANES / 2; h >= 32; h /= 2) {
        __syncthreads();
        if (threadIdx.x < h) s[threadIdx.x] = s[threadIdx.x] + s[threadIdx.x + h];
    }
    double sum = 0.0;
    if (threadIdx.x < 32) {
        __syncwarp();
        sum = s[threadIdx.x];
#pragma unroll
        for (int h = 16; h > 0; h /= 2) sum = sum + __shfl_down_sync(0xffffffffu, sum, h);
    }
    return sum;
}

G8_FN void add_square(float x, double& sum, u32& non_finite) {
    if (is_finite(x)) sum = sum + (double)x * (double)x;
    else non_finite++;
}

// Four neighbours, at an index that is a multiple of 4.
template <class T> G8_FN void load_four(const void* p, u64 i, float (&x)[4]);
template <> G8_FN void load_four<BF16>(const void* p, u64 i, float (&x)[4]) {
    const uint2 v = load8((const u16*)p + i);
    x[0] = float_of(v.x << 16), x[1] = float_of(v.x & 0xffff0000u), x[2] = float_of(v.y << 16), x[3] = float_of(v.y & 0xffff0000u);
}
template <> G8_FN void load_four<F32>(const void* p, u64 i, float (&x)[4]) {
    const uint4 v = load16((const float*)p + i);
    x[0] = float_of(v.x), x[1] = float_of(v.y), x[2] = float_of(v.z), x[3] = float_of(v.w);
}

// One block per tile; each of its 256 threads is a lane, with groups l, l + 256, ... of 4 elements.
template <class T> G8_FN void norm_pass(const NormEntry* entries, const Tiles& tiles) {
    __shared__ double sums[NORM_LANES];
    __shared__ u32 total;
    const Place at = locate(tiles);
    const NormEntry& e = entries[at.tensor];
    if (e.elements == 0) return;
    const u64 left = e.elements - at.begin;
    double sum = 0.0;
    u32 non_finite = 0;
    if (left >= NORM_TILE && (e.flags & VECTOR)) {
        float x[NORM_TILE / 4 / NORM_LANES][4];
#pragma unroll
        for (int r = 0; r < NORM_TILE / 4 / NORM_LANES; r++) load_four<T>(e.src, at.begin + (r * NORM_LANES + threadIdx.x) * 4, x[r]);
#pragma unroll
        for (int r = 0; r < NORM_TILE / 4 / NORM_LANES; r++)
#pragma unroll
            for (int k = 0; k < 4; k++) add_square(x[r][k], sum, non_finite);
    } else {
        const u32 count = (u32)(left < NORM_TILE ? left : NORM_TILE);
        for (u32 i = threadIdx.x * 4; i < count; i += NORM_LANES * 4)
            for (u32 k = i; k < count && k < i + 4; k++) add_square(T::load(e.src, at.begin + k), sum, non_finite);
    }
    if (threadIdx.x == 0) total = 0;
    sums[threadIdx.x] = sum;
    __syncthreads();
    publish_count(non_finite, &total);
    sum = halve<NORM_LANES>(sums);
    if (threadIdx.x == 0) e.tiles[at.begin / NORM_TILE] = NormRecord{sum, (double)total};
}

extern "C" {

__global__ void __launch_bounds__(NORM_LANES) norm_bf16(const NormEntry* e, Tiles t) { norm_pass<BF16>(e, t); }
__global__ void __launch_bounds__(NORM_LANES) norm_f32(const NormEntry* e, Tiles t) { norm_pass<F32>(e, t); }

__global__ void __launch_bounds__(NORM_FINAL_LANES) sum_norms(const NormRecord* tiles, u64 count, NormRecord* total) {
    __shared__ double sums[NORM_FINAL_LANES], counts[NORM_FINAL_LANES];
    double sum = 0.0, non_finite = 0.0;
    u64 i = threadIdx.x;
    // Eight loads at a time; the additions stay in order.
    for (; i + 7 * NORM_FINAL_LANES < count; i += 8 * NORM_FINAL_LANES) {
        double a[8], b[8];
#pragma unroll
        for (int k = 0; k < 8; k++) a[k] = tiles[i + k * NORM_FINAL_LANES].sum_of_squares, b[k] = tiles[i + k * NORM_FINAL_LANES].non_finite;
#pragma unroll
        for (int k = 0; k < 8; k++) sum = sum + a[k], non_finite = non_finite + b[k];
    }
    for (; i < count; i += NORM_FINAL_LANES) sum = sum + tiles[i].sum_of_squares, non_finite = non_finite + tiles[i].non_finite;
    sums[threadIdx.x] = sum;
    counts[threadIdx.x] = non_finite;
    sum = halve<NORM_FINAL_LANES>(sums);
    non_finite = halve<NORM_FINAL_LANES>(counts);
    if (threadIdx.x == 0) *total = NormRecord{sum, non_finite};
}

__global__ void __launch_bounds__(THREADS) control(const NormRecord* total, ControlRecord* control, GroupRecord* groups, u64 count) {
    // Every thread decides alike from what it reads before the barrier; one writes.
    const ControlRecord old = *control;
    const double inverse = old.inverse_loss_scale, norm = root(total->sum_of_squares) * inverse;
    const double ratio = (double)old.max_norm / (norm + 1e-6);
    const double clip = old.max_norm > 0.0f && ratio < 1.0 ? ratio : 1.0;
    const bool found_inf = total->non_finite != 0.0 && old.skip_on_found_inf != 0;
    const u64 step = old.step + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        control->norm = norm;
        control->factor = (float)(inverse * clip);
        control->found_inf = found_inf ? 1 : 0;
        if (found_inf) control->skipped = old.skipped + 1;
        else control->step = step;
    }
    if (found_inf) return;
    for (u64 g = threadIdx.x; g < count; g += THREADS) {
        groups[g].correction1 = (float)(1.0 - power(groups[g].beta1, step));
        groups[g].correction2 = (float)(1.0 - power(groups[g].beta2, step));
    }
}

}
