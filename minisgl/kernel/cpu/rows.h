// The small operations between the matrix products. Each row is computed by itself, in one fixed order.
#pragma once

#include "pool.h"
#include "simd.h"

#include <algorithm>

// f(row) for all rows; those of one chunk, together, are worth a thread's attention.
template <typename F>
static void for_rows(int64_t rows, int64_t floats_per_row, int64_t threads, const F& f) {
    constexpr int64_t CHUNK_FLOATS = 16 * 1024;
    int64_t chunk = std::max<int64_t>(1, CHUNK_FLOATS / floats_per_row);
    pool().run((rows + chunk - 1) / chunk, threads, [&](int64_t i) {
        for (int64_t r = i * chunk; r < std::min(rows, (i + 1) * chunk); r++) f(r);
    });
}

// out = x / rms(x) * weight, where x (n) is replaced by x + added first if there is something to add. In place is fine.
static inline void rms_norm_row(float* x, const float* added, const float* weight, float eps, float* out, int64_t n) {
    vec squares{};
    for (int64_t i = 0; i < n; i += WIDTH) {
        vec v = load_some(x + i, n - i);
        if (added) {
            v += load_some(added + i, n - i);
            store_some(x + i, v, n - i);
        }
        squares = fma(v, v, squares);
    }
    vec scale = splat(1.0f / std::sqrt(sum(squares) / n + eps));
    for (int64_t i = 0; i < n; i += WIDTH)
        store_some(out + i, load_some(x + i, n - i) * scale * load_some(weight + i, n - i), n - i);
}

static void rms_norm(float* x, const float* added, const float* weight, float eps, float* out, int64_t rows, int64_t n,
                     int64_t threads) {
    for_rows(rows, 2 * n, threads, [&](int64_t r) {
        rms_norm_row(x + r * n, added ? added + r * n : nullptr, weight, eps, out + r * n, n);
    });
}

// out (rows, n) = silu(x[:, :n]) * x[:, n:]
static void silu_and_mul(const float* x, float* out, int64_t rows, int64_t n, int64_t threads) {
    for_rows(rows, 3 * n, threads, [&](int64_t r) {
        for (int64_t i = 0; i < n; i += WIDTH) {
            vec gate = load_some(x + 2 * r * n + i, n - i), up = load_some(x + (2 * r + 1) * n + i, n - i);
            store_some(out + r * n + i, gate / (splat(1.0f) + exp(-gate)) * up, n - i);
        }
    });
}

// Rotates pairs (i, i + half) of x by the angles whose cosines and then sines are in cos_sin.
static inline void rope_row(float* x, const float* cos_sin, int64_t half) {
    for (int64_t i = 0; i < half; i += WIDTH) {
        vec low = load_some(x + i, half - i), high = load_some(x + half + i, half - i);
        vec cos = load_some(cos_sin + i, half - i), sin = load_some(cos_sin + half + i, half - i);
        store_some(x + i, low * cos - high * sin, half - i);
        store_some(x + half + i, high * cos + low * sin, half - i);
    }
}

// What a token's q, k and v go through before attention: norm of each head if there are weights for it, rope, and k and v
// to their slot of the pool. qkv (tokens, heads + 2 * kv_heads, dim) is overwritten.
struct RopeStore {
    float* qkv;
    int64_t heads, kv_heads, dim;
    const float *q_norm, *k_norm;
    float eps;
    const float* cos_sin;
    int64_t rotary;
    const int32_t* positions;
    const int64_t* slots;
    float *keys, *values;  // of this layer: (slots, kv_heads, dim)

    void token(int64_t t) const {
        float* head = qkv + t * (heads + 2 * kv_heads) * dim;
        for (int64_t h = 0; h < heads + kv_heads; h++, head += dim) {
            const float* norm = h < heads ? q_norm : k_norm;
            if (norm) rms_norm_row(head, nullptr, norm, eps, head, dim);
            rope_row(head, cos_sin + positions[t] * rotary, rotary / 2);
        }
        int64_t size = kv_heads * dim;
        memcpy(keys + slots[t] * size, head - size, 4 * size);
        memcpy(values + slots[t] * size, head, 4 * size);
    }

    void run(int64_t tokens, int64_t threads) const {
        for_rows(tokens, (heads + 2 * kv_heads) * dim, threads, [&](int64_t t) { token(t); });
    }
};
