// The kernels' C interface, bound by library.py.
#include "gemm.h"

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int minisgl_panel_width() { return NR; }

EXPORT void minisgl_pack(const float* weight, int64_t ldw, float* panels, int64_t N, int64_t K, int threads) {
    pack(weight, ldw, panels, N, K, threads);
}

EXPORT void minisgl_gemm(const float* x, int64_t ldx, const float* panels, const float* bias, float* out, int64_t ldo, int64_t M,
                  int64_t N, int64_t K, int threads) {
    gemm(x, ldx, panels, bias, out, ldo, M, N, K, threads);
}

EXPORT void minisgl_lookup(const float* panels, const int32_t* ids, float* out, int64_t count, int64_t K, int threads) {
    lookup(panels, ids, out, count, K, threads);
}
}
