// The kernels' scalar functions as host code, behind C functions over arrays; tests/host_twin.rs
// compiles this and compares every result with the Rust reference.
#include "numerics.cuh"

extern "C" {
void twin_encode(const float* x, u8* codes, u64 n, int e5m2) {
    for (u64 i = 0; i < n; i++) codes[i] = e5m2 ? encode_soft<E5M2>(x[i]) : encode_soft<E4M3>(x[i]);
}
void twin_decode(const u8* codes, float* x, u64 n, int e5m2) {
    for (u64 i = 0; i < n; i++) x[i] = e5m2 ? decode<E5M2>(codes[i]) : decode<E4M3>(codes[i]);
}
void twin_saturates(const float* x, const float* y, u8* out, u64 n, int e5m2) {
    for (u64 i = 0; i < n; i++) out[i] = e5m2 ? saturates<E5M2>(x[i], y[i]) : saturates<E4M3>(x[i], y[i]);
}
void twin_to_bf16(const float* x, u16* out, u64 n) {
    for (u64 i = 0; i < n; i++) out[i] = to_bf16(x[i]);
}
void twin_from_f16(const u16* x, float* out, u64 n) {
    for (u64 i = 0; i < n; i++) out[i] = canonical(from_f16(x[i]));
}
void twin_amax_word(const float* x, u32* out, u64 n) {
    for (u64 i = 0; i < n; i++) out[i] = amax_word(abs_bits(x[i]));
}
void twin_split(const float* x, u16* high, u16* low, u64 n) {
    for (u64 i = 0; i < n; i++) split(x[i], high[i], low[i]);
}
void twin_join(const u16* high, const u16* low, float* x, u64 n) {
    for (u64 i = 0; i < n; i++) x[i] = join(high[i], low[i]);
}
void twin_scale(const float* amax, float* out, u64 n, int e5m2, u32 margin, int power_of_two) {
    for (u64 i = 0; i < n; i++) out[i] = scale_of(e5m2 ? E5M2::max() : E4M3::max(), amax[i], margin, power_of_two);
}
void twin_power(const double* base, const u64* exponent, double* out, u64 n) {
    for (u64 i = 0; i < n; i++) out[i] = power(base[i], exponent[i]);
}
void twin_adam(const float* g, float* m, float* v, float* p, u64 n, const GroupRecord* group, float factor) {
    for (u64 i = 0; i < n; i++) {
        if (group->mode == 0) adam<false>(g[i], m[i], v[i], p[i], *group, factor);
        else adam<true>(g[i], m[i], v[i], p[i], *group, factor);
        m[i] = canonical(m[i]), v[i] = canonical(v[i]), p[i] = canonical(p[i]);
    }
}
}
