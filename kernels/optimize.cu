// AdamW over the shards of all weights: gradient and moments in, updated weight, master and moments
// out; on request the updated shard's amax and its float8 bytes.
#include "table.cuh"

struct __align__(16) OptimizeEntry {
    const void* grad;
    void* exp_avg;
    void* exp_avg_sq;
    void* weight;
    void* master;  // remainders (u16) or the F32 copy; null if the weight is its own master
    const GroupRecord* group;
    const ControlRecord* control;
    u32* amax;  // null: not recorded
    u8* emit;   // null: no bytes
    const SlotRecord* scales;
    BytesRecord* record;
    u64 elements;
    u32 flags, reserved[3];
};
static_assert(sizeof(OptimizeEntry) == 112, "src/cuda/tables.rs");

// Threads of a block, and how many blocks a multiprocessor must be able to hold: fewer registers
// for BF16 moments, where less memory traffic hides less arithmetic.
#define WIDE_THREADS 192
#define WIDE_BLOCKS 4
#define NARROW_THREADS 128
#define NARROW_BLOCKS 7

// How a shard and its master are stored. pack leaves in x the values as the shard keeps them and
// folds their magnitudes.

// Two masters rounded to their shards: half away from zero, as split does.
G8_FN u32 shard2(float& a, float& b, bool nan) {
    u32 high = __byte_perm(bits_of(a) + 0x8000u, bits_of(b) + 0x8000u, 0x7632);
    if (nan) {
        if (is_nan(a)) high = (high & 0xffff0000u) | NAN_BF16;
        if (is_nan(b)) high = (high & 0x0000ffffu) | (u32)NAN_BF16 << 16;
    }
    a = float_of(high << 16);
    b = float_of(high & 0xffff0000u);
    return high;
}

struct Itself {
    typedef F32::Group Group;
    static G8_FN void load_group(Group& g, const OptimizeEntry& e, u64 i) { F32::load_group(g, e.weight, i); }
    static G8_FN void store_group(const Group& g, const OptimizeEntry& e, u64 i) { F32::store_group(g, e.weight, i); }
    static G8_FN void unpack(const Group& g, int half, float (&x)[4]) { F32::unpack(g, half, x); }
    static G8_FN u32 pack(Group& g, int half, float (&x)[4], bool nan, u32 most) {
        F32::pack(g, half, x, nan);
#pragma unroll
        for (int k = 0; k < 4; k++) most = F32::fold(most, g.w[4 * half + k]);
        return most;
    }
    static G8_FN u32 widen(u32 most) { return most; }
    static G8_FN float load(const OptimizeEntry& e, u64 i) { return F32::load(e.weight, i); }
    static G8_FN float store(const OptimizeEntry& e, u64 i, float x) {
        F32::store(e.weight, i, x);
        return x;
    }
};

struct Remainder {
    struct Group { Words<4> high, low; };
    static G8_FN void load_group(Group& g, const OptimizeEntry& e, u64 i) {
        load_words(g.high.w, (const u16*)e.weight + i);
        load_words(g.low.w, (const u16*)e.master + i);
    }
    static G8_FN void store_group(const Group& g, const OptimizeEntry& e, u64 i) {
        store_words((u16*)e.weight + i, g.high.w);
        store_words((u16*)e.master + i, g.low.w);
    }
    static G8_FN void unpack(const Group& g, int half, float (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            u32 high = g.high.w[2 * half + k], low = g.low.w[2 * half + k];
            // join, for two: the low half's sign, spread over the high half, takes one off.
            x[2 * k] = float_of(__byte_perm(low, high, 0x5410) + permute(low, 0, 0x9944));
            x[2 * k + 1] = float_of(__byte_perm(low, high, 0x7632) + permute(low, 0, 0xbb44));
        }
    }
    static G8_FN u32 pack(Group& g, int half, float (&x)[4], bool nan, u32 most) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            u32 low = __byte_perm(bits_of(x[2 * k]), bits_of(x[2 * k + 1]), 0x5410);
            if (nan) low &= (is_nan(x[2 * k]) ? 0u : 0xffffu) | (is_nan(x[2 * k + 1]) ? 0u : 0xffff0000u);
            g.low.w[2 * half + k] = low;
            g.high.w[2 * half + k] = shard2(x[2 * k], x[2 * k + 1], nan);
            most = BF16::fold(most, g.high.w[2 * half + k]);
        }
        return most;
    }
    static G8_FN u32 widen(u32 most) { return BF16::widen(most); }
    static G8_FN float load(const OptimizeEntry& e, u64 i) { return join(((const u16*)e.weight)[i], ((const u16*)e.master)[i]); }
    static G8_FN float store(const OptimizeEntry& e, u64 i, float x) {
        u16 high, low;
        split(x, high, low);
        ((u16*)e.weight)[i] = high;
        ((u16*)e.master)[i] = low;
        return from_bf16(high);
    }
};

struct Copy {
    struct Group { F32::Group master; Words<4> high; };
    static G8_FN void load_group(Group& g, const OptimizeEntry& e, u64 i) { F32::load_group(g.master, e.master, i); }
    static G8_FN void store_group(const Group& g, const OptimizeEntry& e, u64 i) {
        F32::store_group(g.master, e.master, i);
        store_words((u16*)e.weight + i, g.high.w);
    }
    static G8_FN void unpack(const Group& g, int half, float (&x)[4]) { F32::unpack(g.master, half, x); }
    static G8_FN u32 pack(Group& g, int half, float (&x)[4], bool nan, u32 most) {
        F32::pack(g.master, half, x, nan);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            g.high.w[2 * half + k] = shard2(x[2 * k], x[2 * k + 1], nan);
            most = BF16::fold(most, g.high.w[2 * half + k]);
        }
        return most;
    }
    static G8_FN u32 widen(u32 most) { return BF16::widen(most); }
    static G8_FN float load(const OptimizeEntry& e, u64 i) { return F32::load(e.master, i); }
    static G8_FN float store(const OptimizeEntry& e, u64 i, float x) {
        u16 high, low;
        split(x, high, low);
        F32::store(e.master, i, x);
        ((u16*)e.weight)[i] = high;
        return from_bf16(high);
    }
};

// Division and square root, rounded as IEEE asks, by the steps that the compiler itself takes for
// operands of ordinary size, but without its test and branch at each of them: twelve of those
// would keep four elements from overlapping. The four are tested once instead.
struct Ordinary {
    float inverse1, inverse2;  // of the corrections
    bool corrections;
};
static const u32 ORDINARY_LOW = (127 - 96) << 23, ORDINARY_HIGH = (127 + 20) << 23;

G8_FN float refined_inverse(float b) {
    float r = rcp_approx(b);
    return __fmaf_rn(r, __fmaf_rn(-b, r, 1.0f), r);
}
G8_FN float divide_ordinary(float a, float b, float inverse) {
    float q = a * inverse;
    return __fmaf_rn(inverse, __fmaf_rn(-b, q, a), q);
}
G8_FN float root_ordinary(float x) {
    float y = rsqrt_approx(x), s = x * y, half = y * 0.5f;
    return __fmaf_rn(__fmaf_rn(-s, s, x), half, s);
}
// Corrections in [2^-30, 1] and eps in [0, 2^10]: with moments in [2^-96, 2^20] no quotient,
// remainder or root leaves the normal range.
G8_FN Ordinary ordinary(const GroupRecord& group) {
    const float least = float_of((127 - 30) << 23);
    bool fits = group.correction1 >= least && group.correction1 <= 1.0f && group.correction2 >= least && group.correction2 <= 1.0f &&
                group.eps >= 0.0f && group.eps <= 1024.0f;
    return {refined_inverse(group.correction1), refined_inverse(group.correction2), fits};
}

// The plain formula; not inlined, because few groups take it.
__device__ __noinline__ void directions(float* m_in_d_out, const float* v, float correction1, float correction2, float eps) {
#pragma unroll 1
    for (int k = 0; k < 4; k++) m_in_d_out[k] = adam_direction(m_in_d_out[k], v[k], correction1, correction2, eps);
}

template <bool L2>
G8_FN void adam4(const float (&g)[4], float (&m)[4], float (&v)[4], float (&x)[4], const GroupRecord& group, float factor, const Ordinary& with) {
    float d[4];
    u32 reach = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        adam_moments<L2>(g[k], m[k], v[k], x[k], group, factor);
        // What lies below the range wraps to above it; so do zeros and a negative second moment.
        reach = max(reach, max(abs_bits(m[k]) - ORDINARY_LOW, bits_of(v[k]) - ORDINARY_LOW));
    }
    if (with.corrections && reach <= ORDINARY_HIGH - ORDINARY_LOW) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float below = root_ordinary(divide_ordinary(v[k], group.correction2, with.inverse2)) + group.eps;
            float above = divide_ordinary(m[k], group.correction1, with.inverse1);
            d[k] = divide_ordinary(above, below, refined_inverse(below));
        }
    } else {
        float numbers[4] = {m[0], m[1], m[2], m[3]}, roots[4] = {v[0], v[1], v[2], v[3]};
        directions(numbers, roots, group.correction1, group.correction2, group.eps);
#pragma unroll
        for (int k = 0; k < 4; k++) d[k] = numbers[k];
    }
#pragma unroll
    for (int k = 0; k < 4; k++) x[k] = adam_apply<L2>(x[k], d[k], group);
}

template <class F> G8_FN u32 emit4(const float (&x)[4], float scale) {
    float y[4];
#pragma unroll
    for (int k = 0; k < 4; k++) y[k] = x[k] * scale;
    return encode4<F>(y);
}

template <class G, class M, class W, int T> G8_FN void optimize_pass(const OptimizeEntry* entries, const Tiles& tiles) {
    const Place at = locate(tiles);
    const OptimizeEntry& e = entries[at.tensor];
    const u64 end = at.begin + tiles.size < e.elements ? at.begin + tiles.size : e.elements;
    const bool emit = e.emit != nullptr, e5m2 = e.flags & IS_E5M2, skip = e.control->found_inf != 0;
    const float factor = e.control->factor, scale = emit ? e.scales->published : 0.0f;
    const GroupRecord group = *e.group;
    const Ordinary with = ordinary(group);
    u32 most = 0;
    u64 i = at.begin + threadIdx.x * 8;
    if (e.flags & VECTOR) {
#pragma unroll 1
        for (; i + 8 <= end; i += T * 8) {
            // All loads are under way before the control record's answer is needed.
            typename G::Group gs;
            typename W::Group xs;
            typename M::Group ms, vs;
            G::load_group(gs, e.grad, i);
            W::load_group(xs, e, i);
            M::load_group(ms, e.exp_avg, i);
            M::load_group(vs, e.exp_avg_sq, i);
            if (skip) return;
            u32 codes[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float g[4], m[4], v[4], x[4];
                G::unpack(gs, half, g);
                W::unpack(xs, half, x);
                M::unpack(ms, half, m);
                M::unpack(vs, half, v);
                if (group.mode == 0) adam4<false>(g, m, v, x, group, factor, with);
                else adam4<true>(g, m, v, x, group, factor, with);
                // A moment that is NaN makes the weight NaN, so that one test covers all three.
                const bool nan = any_nan(x);
                M::pack(ms, half, m, nan);
                M::pack(vs, half, v, nan);
                most = W::pack(xs, half, x, nan, most);
                if (emit) codes[half] = e5m2 ? emit4<E5M2>(x, scale) : emit4<E4M3>(x, scale);
            }
            M::store_group(ms, e.exp_avg, i);
            M::store_group(vs, e.exp_avg_sq, i);
            W::store_group(xs, e, i);
            if (emit) store8(e.emit + i, make_uint2(codes[0], codes[1]));
        }
        most = W::widen(most);
    }
    if (skip) return;
    // What is left: the end of a tensor, or all of one that is not aligned.
#pragma unroll 1
    for (; i < end; i += T * 8) {
        const u64 stop = i + 8 < end ? i + 8 : end;
#pragma unroll 1
        for (u64 j = i; j < stop; j++) {
            float x = W::load(e, j), m = M::load(e.exp_avg, j), v = M::load(e.exp_avg_sq, j), g = G::load(e.grad, j);
            if (group.mode == 0) adam<false>(g, m, v, x, group, factor);
            else adam<true>(g, m, v, x, group, factor);
            M::store(e.exp_avg, j, m);
            M::store(e.exp_avg_sq, j, v);
            x = W::store(e, j, x);
            most = max(most, abs_bits(x));
            if (emit) e.emit[j] = (u8)(e5m2 ? encode2<E5M2>(x * scale, 0.0f) : encode2<E4M3>(x * scale, 0.0f));
        }
    }
    if (e.amax) publish_amax<T>(most, e.amax);
    if (emit && threadIdx.x == 0 && at.begin == 0)
        *e.record = BytesRecord{scale, e.scales->published_inv, e.scales->version + 1, 0};
}

// optimize_GRADIENT_MOMENTS_MASTER
#define OPTIMIZE(NAME, G, M, W, T, B) \
    extern "C" __global__ void __launch_bounds__(T, B) NAME(const OptimizeEntry* e, Tiles t) { optimize_pass<G, M, W, T>(e, t); }
#define OPTIMIZE_MASTERS(G, g, M, m, T, B) \
    OPTIMIZE(optimize_##g##_##m##_remainder, G, M, Remainder, T, B) \
    OPTIMIZE(optimize_##g##_##m##_copy, G, M, Copy, T, B) \
    OPTIMIZE(optimize_##g##_##m##_itself, G, M, Itself, T, B)
OPTIMIZE_MASTERS(BF16, bf16, F32, f32, WIDE_THREADS, WIDE_BLOCKS)
OPTIMIZE_MASTERS(BF16, bf16, BF16, bf16, NARROW_THREADS, NARROW_BLOCKS)
OPTIMIZE_MASTERS(F32, f32, F32, f32, WIDE_THREADS, WIDE_BLOCKS)
OPTIMIZE_MASTERS(F32, f32, BF16, bf16, NARROW_THREADS, NARROW_BLOCKS)
