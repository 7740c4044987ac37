// From a row of logits to a token: argmax, or temperature, top-k, top-p and min-p and the inverse of the distribution
// function. What is kept is defined in engine/cutoff.py: probabilities of at least the largest of three cut-offs.
//
// A row is one thread's, and all sums over it run in one fixed order. Weights are relative to the largest, which is 1.
#pragma once

#include "memory.h"
#include "pool.h"
#include "simd.h"

#include <algorithm>

// Index of the largest of x (n), the lowest one of equals; -1 if it is not finite, or if there is a NaN.
static inline int32_t argmax_row(const float* x, int64_t n, float& largest) {
    vec best = splat(-INFINITY);
    ivec index, best_index{}, nan{};
    for (int i = 0; i < WIDTH; i++) index[i] = i;
    for (int64_t i = 0; i < n; i += WIDTH, index += WIDTH) {
        vec v = load_some(x + i, n - i, -INFINITY);
        nan |= v != v;
        best_index = v > best ? index : best_index;
        best = v > best ? v : best;
    }
    int winner = 0;
    bool finite = true;
    for (int i = 0; i < WIDTH; i++) {
        finite &= !nan[i];
        if (best[i] > best[winner] || (best[i] == best[winner] && best_index[i] < best_index[winner])) winner = i;
    }
    largest = best[winner];
    return finite && std::isfinite(largest) ? best_index[winner] : -1;
}

// The weights of one row, padded with zeros to whole blocks.
struct Weights {
    static constexpr int64_t BLOCK = 256;
    float* w;
    int64_t n;  // padded

    Weights(float* memory, const float* logits, int64_t count, float largest, float temperature)
        : w(memory), n(round_up(count, BLOCK)) {
        vec top = splat(largest), scale = splat(1.0f / temperature);
        for (int64_t i = 0; i < n; i += WIDTH)
            store(w + i, exp((load_some(logits + i, std::max<int64_t>(0, count - i), -INFINITY) - top) * scale));
    }

    // Sum over the weights of at least `cutoff`, or how many these are.
    template <bool COUNT>
    double sum_from(float cutoff) const {
        vec least = splat(cutoff);
        double total = 0;
        for (int64_t block = 0; block < n; block += 16 * BLOCK) {
            vec part[4]{};
            for (int64_t i = block; i < std::min(n, block + 16 * BLOCK); i += 4 * WIDTH)
                for (int j = 0; j < 4; j++) {
                    vec v = load(w + i + j * WIDTH);
                    part[j] += v >= least ? (COUNT ? splat(1) : v) : vec{};
                }
            total += sum((part[0] + part[1]) + (part[2] + part[3]));
        }
        return total;
    }

    // The largest number that `enough` accepts, which accepts all numbers below one it accepts, and 0. Floats from 0 on are
    // ordered like the integers of the same bits, so this takes 30 halvings.
    template <typename F>
    static float largest_cutoff(const F& enough) {
        auto number = [](int32_t bits) {
            float x;
            memcpy(&x, &bits, 4);
            return x;
        };
        int32_t low = 0, high = 0x3f800001;  // just above 1
        while (high - low > 1) {
            int32_t middle = low + (high - low) / 2;
            (enough(number(middle)) ? low : high) = middle;
        }
        return number(low);
    }

    // top_k below 1 is off, top_p 1, min_p 0.
    float cutoff(int32_t top_k, float top_p, float min_p) const {
        float least = min_p;
        double mass = -1;
        if (top_k > 0) {
            float kth = largest_cutoff([&](float c) { return sum_from<true>(c) >= top_k; });
            float above = std::nextafter(kth, 2.0f);
            mass = sum_from<false>(above) + (top_k - sum_from<true>(above)) * kth;
            least = std::max(least, kth);
        }
        if (top_p < 1) {
            double need = top_p * (mass < 0 ? sum_from<false>(0) : mass);
            least = std::max(least, largest_cutoff([&](float c) { return sum_from<false>(c) >= need; }));
        }
        return least;
    }

    // The index under `uniform` of the mass of those from `least` on; never one of weight 0.
    int32_t pick(float least, float uniform, double* before) const {
        vec bound = splat(least);
        double total = 0;
        for (int64_t b = 0; b < n / BLOCK; b++) {
            vec part{};
            for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i += WIDTH) {
                vec v = load(w + i);
                part += v >= bound ? v : vec{};
            }
            before[b] = total;
            total += sum(part);
        }
        // The last block that begins at or before the target, so it has mass. Summed up one by one it may, by rounding, end
        // short of the target: then it is the last of those kept.
        double target = uniform * total;
        int64_t block = std::upper_bound(before, before + n / BLOCK, target) - before - 1;
        double reached = before[block];
        int32_t token = 0;
        for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK && reached <= target; i++)
            if (w[i] >= least && w[i] > 0) {
                token = i;
                reached += w[i];
            }
        return token;
    }
};

constexpr float GREEDY_BELOW = 1e-5f;  // as in engine/sampler.py: dividing by less would overflow

// The token of each row of logits (rows, n), -1 where they are not finite.
static void sample(const float* logits, const float* temperature, const int32_t* top_k, const float* top_p,
                   const float* min_p, const float* uniform, int32_t* out, int64_t rows, int64_t n, int64_t threads) {
    pool().run(rows, threads, [&](int64_t r) {
        float largest;
        out[r] = argmax_row(logits + r * n, n, largest);
        if (out[r] < 0 || temperature[r] < GREEDY_BELOW || top_k[r] == 1) return;
        int64_t padded = round_up(n, Weights::BLOCK);
        float* memory = scratch<Weights>(padded + 2 * padded / Weights::BLOCK);
        Weights weights(memory, logits + r * n, n, largest, temperature[r]);
        float least = weights.cutoff(top_k[r], top_p[r], min_p[r]);
        out[r] = weights.pick(least, uniform[r], reinterpret_cast<double*>(memory + padded));
    });
}
