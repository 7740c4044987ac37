// The kernels' C interface, bound by kernels.py.
#include "attention.h"
#include "gemm.h"
#include "rows.h"
#include "sample.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int minisgl_panel_width() { return NR; }

EXPORT void minisgl_pack(const float* weight, int64_t ldw, float* panels, int64_t N, int64_t K, int64_t threads) {
    pack(weight, ldw, panels, N, K, threads);
}

EXPORT void minisgl_gemm(const float* x, int64_t ldx, const float* panels, const float* bias, float* out, int64_t ldo,
                         int64_t M, int64_t N, int64_t K, int64_t threads) {
    gemm(x, ldx, panels, bias, out, ldo, M, N, K, threads);
}

EXPORT void minisgl_lookup(const float* panels, const int32_t* ids, float* out, int64_t count, int64_t N, int64_t K,
                           int64_t threads) {
    lookup(panels, ids, out, count, N, K, threads);
}

EXPORT void minisgl_rms_norm(float* x, const float* added, const float* weight, float eps, float* out, int64_t rows,
                             int64_t n, int64_t threads) {
    rms_norm(x, added, weight, eps, out, rows, n, threads);
}

EXPORT void minisgl_silu_and_mul(const float* x, float* out, int64_t rows, int64_t n, int64_t threads) {
    silu_and_mul(x, out, rows, n, threads);
}

EXPORT void minisgl_rope_store(float* qkv, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                               const float* q_norm, const float* k_norm, float eps, const float* cos_sin, int64_t rotary,
                               const int32_t* positions, const int64_t* slots, float* keys, float* values, int64_t threads) {
    RopeStore rope{qkv, heads, kv_heads, dim, q_norm, k_norm, eps, cos_sin, rotary, positions, slots, keys, values};
    rope.run(tokens, threads);
}

EXPORT void minisgl_attention(const float* q, int64_t token_stride, int64_t head_stride, const float* keys,
                              const float* values, float* out, int64_t heads, int64_t kv_heads, int64_t dim, float scale,
                              int64_t window, const int32_t* table, int64_t table_stride, int64_t page_size,
                              const int32_t* rows, const int32_t* cached, const int32_t* cu_new, int64_t requests,
                              int64_t threads) {
    Attention attention{q,      token_stride, head_stride, keys,         values,    out,  heads,  kv_heads, dim,
                        scale,  window,       table,       table_stride, page_size, rows, cached, cu_new,   requests};
    attention.run(threads);
}

EXPORT void minisgl_sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p,
                           const float* min_p, const float* uniform, int32_t* out, int64_t rows, int64_t n,
                           int64_t threads) {
    sample(logits, temperature, top_k, top_p, min_p, uniform, out, rows, n, threads);
}
