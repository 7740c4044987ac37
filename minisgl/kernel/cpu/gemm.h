// out = x W^T + bias, row by row independent of all else.
//
// W (N, K) is stored in panels: NR = 2 vectors of outputs interleaved, k after k, the last panel padded with zeros.
//
//     W row-major                  panel 0            panel 1
//     n0  a b c d                  a e                i m
//     n1  e f g h        NR = 2    b f                j n
//     n2  i j k l        ----->    c g                k o
//     n3  m n o p                  d h                l p
//
// Every output element is one chain of fused multiply-adds over k = 0, 1, .. K - 1. A tile only decides which chains
// run beside each other, and a block of k only where a chain rests in memory for a while. So a row of the result is
// bitwise the same whatever M is, however the work is cut, and with any number of threads.
//
// A thread works through one panel at a time with all rows of x, so each weight is read from memory once for up to
// BLOCK_FLOATS / K rows: few rows run at the speed of memory, many at that of the FMA units. (The packing and the
// register tile are those of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.)
#pragma once

#include "memory.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>
#include <array>
#include <utility>

constexpr int NR = 2 * WIDTH;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int MR = 12;  // 24 of 32 registers accumulate
#else
constexpr int MR = 6;  // 12 of 16
#endif

constexpr int64_t BLOCK_K = 2048;
constexpr int64_t BLOCK_FLOATS = 96 * 1024;  // of packed x, to stay in a core's second-level cache

// c (ROWS, NR) = or += a^T b, for a packed tile a (k, ROWS) and a panel b (k, NR).
template <int ROWS>
static void tile(int64_t k, const float* __restrict a, const float* __restrict b, float* __restrict c, int64_t ldc,
                 bool resume) {
    vec low[ROWS], high[ROWS];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        low[m] = resume ? load(c + m * ldc) : vec{};
        high[m] = resume ? load(c + m * ldc + WIDTH) : vec{};
    }
    for (int64_t i = 0; i < k; i++, a += ROWS, b += NR) {
        vec b_low = load(b), b_high = load(b + WIDTH);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            vec x = splat(a[m]);
            low[m] = fma(x, b_low, low[m]);
            high[m] = fma(x, b_high, high[m]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) {
        store(c + m * ldc, low[m]);
        store(c + m * ldc + WIDTH, high[m]);
    }
}

typedef void (*Tile)(int64_t k, const float* a, const float* b, float* c, int64_t ldc, bool resume);

// The tiles of 1 .. MR rows, by their number of rows.
template <int... LESS>
constexpr std::array<Tile, MR + 1> make_tiles(std::integer_sequence<int, LESS...>) {
    return {nullptr, tile<LESS + 1>...};
}
constexpr auto TILES = make_tiles(std::make_integer_sequence<int, MR>());

// The cut of `rows` into tiles of nearly equal height: the first `tall` have height + 1 rows, the others height.
struct Cut {
    int64_t count, height, tall;
    explicit Cut(int64_t rows) : count((rows + MR - 1) / MR), height(rows / count), tall(rows % count) {}
    int64_t begin(int64_t t) const { return t * height + std::min(t, tall); }
    int64_t rows(int64_t t) const { return height + (t < tall); }
};

// dst (k, rows) = transpose of x (rows, k)
static inline void pack_tile(const float* x, int64_t ldx, int64_t rows, int64_t k, float* dst) {
    for (int64_t m = 0; m < rows; m++)
        for (int64_t i = 0; i < k; i++) dst[i * rows + m] = x[m * ldx + i];
}

static void gemm(const float* x, int64_t ldx, const float* panels, const float* bias, float* out, int64_t ldo, int64_t M,
                 int64_t N, int64_t K, int64_t threads) {
    int64_t num_panels = (N + NR - 1) / NR;
    int64_t block_k = std::min(K, BLOCK_K);
    int64_t block_m = std::min(M, std::max<int64_t>(MR, BLOCK_FLOATS / block_k / MR * MR));
    int64_t chunk = std::max<int64_t>(1, num_panels / (16 * threads));
    struct PackedRows;
    float* packed = M == 1 ? nullptr : scratch<PackedRows>(block_m * block_k);
    for (int64_t m0 = 0; m0 < M; m0 += block_m) {
        Cut cut(std::min(block_m, M - m0));
        for (int64_t k0 = 0; k0 < K; k0 += block_k) {
            int64_t depth = std::min(block_k, K - k0);
            bool first = k0 == 0, last = k0 + depth == K;
            const float* tiles = M == 1 ? x + k0 : packed;
            if (M > 1)
                pool().run(cut.count, threads, [&](int64_t t) {
                    pack_tile(x + (m0 + cut.begin(t)) * ldx + k0, ldx, cut.rows(t), depth, packed + cut.begin(t) * depth);
                });
            // One panel, all rows of the block.
            auto multiply = [&](int64_t p) {
                const float* panel = panels + (p * K + k0) * NR;
                int64_t columns = std::min<int64_t>(NR, N - p * NR);
                for (int64_t t = 0; t < cut.count; t++) {
                    int64_t rows = cut.rows(t);
                    const float* a = tiles + cut.begin(t) * depth;
                    float* c = out + (m0 + cut.begin(t)) * ldo + p * NR;
                    if (columns == NR) {
                        TILES[rows](depth, a, panel, c, ldo, !first);
                    } else {
                        float whole[MR * NR];
                        if (!first)
                            for (int64_t m = 0; m < rows; m++) std::copy_n(c + m * ldo, columns, whole + m * NR);
                        TILES[rows](depth, a, panel, whole, NR, !first);
                        for (int64_t m = 0; m < rows; m++) std::copy_n(whole + m * NR, columns, c + m * ldo);
                    }
                    if (bias && last)
                        for (int64_t m = 0; m < rows; m++)
                            for (int64_t n = 0; n < columns; n++) c[m * ldo + n] += bias[p * NR + n];
                }
            };
            pool().run((num_panels + chunk - 1) / chunk, threads, [&](int64_t i) {
                for (int64_t p = i * chunk; p < std::min(num_panels, (i + 1) * chunk); p++) multiply(p);
            });
        }
    }
}

static void pack(const float* weight, int64_t ldw, float* panels, int64_t N, int64_t K, int64_t threads) {
    pool().run((N + NR - 1) / NR, threads, [&](int64_t p) {
        float* panel = panels + p * K * NR;
        int64_t columns = std::min<int64_t>(NR, N - p * NR);
        for (int64_t k = 0; k < K; k++)
            for (int64_t n = 0; n < NR; n++) panel[k * NR + n] = n < columns ? weight[(p * NR + n) * ldw + k] : 0;
    });
}

// out (count, K) = rows `ids` of the matrix in panels, NaN for what is no row of it.
static void lookup(const float* panels, const int32_t* ids, float* out, int64_t count, int64_t N, int64_t K,
                   int64_t threads) {
    pool().run(count, threads, [&](int64_t i) {
        int64_t id = ids[i];
        if (id < 0 || id >= N) {
            std::fill_n(out + i * K, K, NAN);
            return;
        }
        const float* column = panels + id / NR * NR * K + id % NR;
        for (int64_t k = 0; k < K; k++) out[i * K + k] = column[k * NR];
    });
}
