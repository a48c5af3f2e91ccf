// One-line wrappers over PTX: streaming accesses, conversions, reductions.
#pragma once
#include "numerics.cuh"

// Wide accesses to device memory, without cache hints: measured on an H200, evict-first loads or
// stores cost a cast 8 %. Volatile keeps them in order among each other, so that a pass may work in
// place and all loads of a tile are under way before the first store.
G8_FN uint4 load16(const void* p) { uint4 v; asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)); return v; }
G8_FN uint2 load8(const void* p) { uint2 v; asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p)); return v; }
G8_FN void store16(void* p, uint4 v) { asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)); }
G8_FN void store8(void* p, uint2 v) { asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y)); }

// Bytes of a and b by selector; a selector's high bit spreads the byte's sign, which the intrinsic
// __byte_perm does not offer.
G8_FN u32 permute(u32 a, u32 b, u32 selector) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector)); return r; }

// A word that other blocks may be changing.
G8_FN u32 peek(const u32* p) { u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p)); return v; }

#if __CUDA_ARCH__ >= 890
// Two values to two codes; the first in the low byte. Every NaN gives 0x7f, infinities the largest.
template <class F> G8_FN u32 encode2(float a, float b);
template <> G8_FN u32 encode2<E4M3>(float a, float b) { u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a)); return r; }
template <> G8_FN u32 encode2<E5M2>(float a, float b) { u16 r; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(b), "f"(a)); return r; }
#else
template <class F> G8_FN u32 encode2(float a, float b) { return encode_soft<F>(a) | (u32)encode_soft<F>(b) << 8; }
#endif

// Two values to BF16, nearest even, the first in the low half. Any NaN gives 0x7fff.
G8_FN u32 pack_bf16(float a, float b) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a)); return r; }

G8_FN float from_f16_hard(u16 h) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h)); return x; }

// Approximations, the start of an exact division or root.
G8_FN float rcp_approx(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
G8_FN float rsqrt_approx(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// The device's clock, in nanoseconds; it moves in steps of about a microsecond.
G8_FN u64 nanoseconds_now() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
