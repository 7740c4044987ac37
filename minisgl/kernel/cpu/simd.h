// Vectors of floats on GCC's vector extensions: one source for AVX-512, AVX2 + FMA and everything else.
//
// The compiler contracts nothing (-ffp-contract=off): a fused multiply-add is one where fma() is written, so a kernel's
// roundings do not depend on how the compiler happens to schedule a tile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef float unaligned_vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

static inline vec load(const float* p) { return *reinterpret_cast<const unaligned_vec*>(p); }
static inline void store(float* p, vec v) { *reinterpret_cast<unaligned_vec*>(p) = v; }
static inline vec splat(float x) { return x - vec{}; }

static inline vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The first n lanes from p, the rest `fill`; n may exceed the width. Nothing past p + n is touched.
static inline vec load_some(const float* p, int64_t n, float fill = 0) {
    if (n >= WIDTH) return load(p);
    vec v = splat(fill);
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
}

static inline void store_some(float* p, vec v, int64_t n) {
    if (n >= WIDTH) return store(p, v);
    for (int i = 0; i < n; i++) p[i] = v[i];
}

static inline vec maximum(vec a, vec b) { return a > b ? a : b; }

// Lanes are combined in halves, always in this order.
template <typename Op>
static inline float reduce(vec v, Op op) {
#pragma GCC unroll 4
    for (int half = WIDTH / 2; half; half /= 2) {
        ivec turned;
        for (int i = 0; i < WIDTH; i++) turned[i] = (i + half) % WIDTH;
        v = op(v, __builtin_shuffle(v, turned));
    }
    return v[0];
}

static inline float sum(vec v) {
    return reduce(v, [](vec a, vec b) { return a + b; });
}

static inline float maximum(vec v) {
    return reduce(v, [](vec a, vec b) { return maximum(a, b); });
}

// e^x to about one unit in the last place; exactly 0 below -87, infinity above 88, NaN for NaN.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, where ln 2 is split so that n * LN2_HIGH is exact; e^r by its Taylor series to
// r^7 (the rest is below 6e-9); 2^n is added into the exponent bits. Adding 1.5 * 2^23 rounds to an integer and leaves
// that integer in the low bits.
static inline vec exp(vec x) {
    constexpr float LOG2_E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f, MAGIC = 12582912.0f;
    vec top = splat(88.0f), bottom = splat(-87.0f);
    vec clamped = x > top ? top : x;
    clamped = clamped < bottom ? bottom : clamped;
    vec shifted = fma(clamped, splat(LOG2_E), splat(MAGIC));
    vec n = shifted - splat(MAGIC);
    vec r = fma(n, splat(-LN2_HIGH), clamped);
    r = fma(n, splat(-LN2_LOW), r);
    vec p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(1.0f / 2));
    p = fma(p * r, r, r) + splat(1.0f);
    vec result = (vec)((ivec)p + ((ivec)shifted << 23));
    result = x < bottom ? vec{} : result;
    result = x > top ? splat(INFINITY) : result;
    return x == x ? result : x;
}
