// The numbers: every rule of the passes as plain scalar functions. They compile as device code and
// as host C++, so that a test without a GPU compares them with the reference bit for bit.
//
// Compile with --fmad=false and without flush-to-zero or fast math: each operation below rounds
// once, in the order in which it is written.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDACC__
#define G8_FN __device__ __forceinline__
G8_FN u32 bits_of(float x) { return __float_as_uint(x); }
G8_FN float float_of(u32 bits) { return __uint_as_float(bits); }
G8_FN double double_of(u64 bits) { return __longlong_as_double((long long)bits); }
G8_FN float root(float x) { return __fsqrt_rn(x); }
G8_FN double root(double x) { return __dsqrt_rn(x); }
#else
#include <cmath>
#include <cstring>
#define G8_FN inline
G8_FN u32 bits_of(float x) { u32 u; std::memcpy(&u, &x, 4); return u; }
G8_FN float float_of(u32 u) { float x; std::memcpy(&x, &u, 4); return x; }
G8_FN double double_of(u64 u) { double x; std::memcpy(&x, &u, 8); return x; }
G8_FN float root(float x) { return std::sqrt(x); }
G8_FN double root(double x) { return std::sqrt(x); }
#endif

static const u32 NAN_BITS = 0x7fc00000u;  // the only f32 NaN that is ever stored
static const u16 NAN_BF16 = 0x7fc0u;
static const u32 INF_BITS = 0x7f800000u;
static const u32 TOUCHED = 0x80000000u;   // a bank's word: TOUCHED | bits of |amax|

G8_FN u32 abs_bits(float x) { return bits_of(x) & 0x7fffffffu; }
G8_FN bool is_nan(float x) { return abs_bits(x) > INF_BITS; }
G8_FN bool is_finite(float x) { return abs_bits(x) < INF_BITS; }
G8_FN float canonical(float x) { return is_nan(x) ? float_of(NAN_BITS) : x; }

// ---- BF16 and F16 ----

G8_FN float from_bf16(u32 h) { return float_of(h << 16); }

// Nearest even.
G8_FN u16 to_bf16(float x) {
    u32 u = bits_of(x);
    if (is_nan(x)) return NAN_BF16;
    return (u16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

G8_FN float from_f16(u16 h) {
    u32 sign = (u32)(h & 0x8000u) << 16, abs = h & 0x7fffu;
    if (abs > 0x7c00u) return float_of(NAN_BITS);
    if (abs == 0x7c00u) return float_of(sign | INF_BITS);
    // The exponent's bias is 112 smaller; a product is exact for subnormals too.
    return float_of(bits_of(float_of(abs << 13) * float_of((127u + 112u) << 23)) | sign);
}

// ---- the amax word ----

// The word that a magnitude leaves in a slot; any NaN becomes the canonical one.
G8_FN u32 amax_word(u32 abs) { return TOUCHED | (abs > INF_BITS ? NAN_BITS : abs); }

// ---- float8 ----

struct E4M3 {
    enum { MANTISSA = 3, BIAS = 7, MAX_CODE = 0x7e };
    static G8_FN float max() { return 448.0f; }
    static G8_FN float saturation_bound() { return 464.0f; }
};
struct E5M2 {
    enum { MANTISSA = 2, BIAS = 15, MAX_CODE = 0x7b };
    static G8_FN float max() { return 57344.0f; }
    static G8_FN float saturation_bound() { return 61440.0f; }
};

// The software conversion: clamps to the largest value (infinities too), rounds to nearest even,
// keeps subnormals and the sign of zero, and makes every NaN 0x7f.
template <class F> G8_FN u8 encode_soft(float x) {
    u32 u = bits_of(x), sign = (u >> 24) & 0x80u, abs = u & 0x7fffffffu;
    if (abs > INF_BITS) return 0x7f;
    int exponent = (int)(abs >> 23) - 127;
    int below = (1 - (int)F::BIAS) - exponent;
    int drop = 23 - (int)F::MANTISSA + (below > 0 ? below : 0);
    if (drop > 24 || exponent < -126) return (u8)sign;
    u32 significand = (abs & 0x007fffffu) | 0x00800000u;
    u32 kept = significand >> drop, rest = significand & ((1u << drop) - 1u), half = 1u << (drop - 1);
    u32 rounded = kept + ((rest > half || (rest == half && (kept & 1u))) ? 1u : 0u);
    u32 code = below > 0 ? rounded
                         : ((u32)(exponent + (int)F::BIAS) << F::MANTISSA) + rounded - (1u << F::MANTISSA);
    return (u8)(sign | (code > (u32)F::MAX_CODE ? (u32)F::MAX_CODE : code));
}

template <class F> G8_FN float decode(u8 code) {
    u32 sign = (u32)(code & 0x80u) << 24, abs = code & 0x7fu;
    if (F::MANTISSA == 3 && abs == 0x7fu) return float_of(NAN_BITS);
    if (F::MANTISSA == 2 && abs >= 0x7cu) return float_of(abs == 0x7cu ? sign | INF_BITS : NAN_BITS);
    // Exact, subnormals included: the code's exponent bias is corrected by a power of two.
    float magnitude = float_of(abs << (23 - F::MANTISSA)) * float_of((u32)(254 - (int)F::BIAS) << 23);
    return float_of(bits_of(magnitude) | sign);
}

// A finite value whose scaled magnitude lies above the midpoint beyond the largest code.
template <class F> G8_FN bool saturates(float x, float scaled) {
    return is_finite(x) && float_of(abs_bits(scaled)) > F::saturation_bound();
}

// ---- scales ----

// max / max(amax, 1e-12) * 2^-margin in f64, rounded once, clamped to the normal range, then
// truncated to a power of two if asked. The amax is finite.
G8_FN float scale_of(double largest, float amax, u32 margin, bool power_of_two) {
    double floor = 1e-12, wide = (double)float_of(abs_bits(amax));
    double exact = largest / (wide > floor ? wide : floor) * double_of((u64)(1023u - margin) << 52);
    float scale = (float)exact;
    if (!(scale >= float_of(0x00800000u))) scale = float_of(0x00800000u);
    if (scale > float_of(0x7f7fffffu)) scale = float_of(0x7f7fffffu);
    return power_of_two ? float_of(bits_of(scale) & 0x7f800000u) : scale;
}

// ---- the 16-bit remainder ----

// Half away from zero; a NaN becomes the canonical pair.
G8_FN void split(float x, u16& high, u16& low) {
    u32 u = bits_of(x);
    bool nan = is_nan(x);
    high = nan ? NAN_BF16 : (u16)((u + 0x8000u) >> 16);
    low = nan ? (u16)0 : (u16)u;
}

// Undoes split for every value that is not NaN.
G8_FN float join(u32 high, u32 low) { return float_of((high << 16 | low) - ((low & 0x8000u) << 1)); }

// ---- AdamW ----

struct GroupRecord {
    double beta1, beta2;
    float lr, weight_decay, eps;
    u32 mode;
    float b1, one_minus_b1, b2, one_minus_b2;
    float correction1, correction2;
    u32 reserved[2];
};

// One element's step, AdamW or Adam with L2 regularisation, in three parts. First the moments.
template <bool L2> G8_FN void adam_moments(float grad, float& m, float& v, float p, const GroupRecord& group, float factor) {
    float g = grad * factor;
    if (L2) g = g + group.weight_decay * p;
    m = group.b1 * m + group.one_minus_b1 * g;
    v = group.b2 * v + (group.one_minus_b2 * g) * g;
}

G8_FN float adam_direction(float m, float v, float correction1, float correction2, float eps) {
    return (m / correction1) / (root(v / correction2) + eps);
}

template <bool L2> G8_FN float adam_apply(float p, float direction, const GroupRecord& group) {
    if (!L2) direction = direction + group.weight_decay * p;
    return p - group.lr * direction;
}

template <bool L2> G8_FN void adam(float grad, float& m, float& v, float& p, const GroupRecord& group, float factor) {
    adam_moments<L2>(grad, m, v, p, group, factor);
    p = adam_apply<L2>(p, adam_direction(m, v, group.correction1, group.correction2, group.eps), group);
}

// b^n in f64 by squaring, lowest bit of the exponent first.
G8_FN double power(double base, u64 n) {
    double result = 1.0;
    while (n != 0) {
        if (n & 1) result = result * base;
        n >>= 1;
        if (n != 0) base = base * base;
    }
    return result;
}
