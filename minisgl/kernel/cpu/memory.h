// Working memory that a thread keeps from one call to the next.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

static inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// At least n floats of this thread, aligned to a cache line, not initialised. Each Purpose has its own.
template <typename Purpose>
static float* scratch(int64_t n) {
    struct Free {
        void operator()(float* p) const { free(p); }
    };
    static thread_local std::unique_ptr<float[], Free> memory;
    static thread_local int64_t size = 0;
    if (size < n) {
        memory.reset();
        memory.reset(static_cast<float*>(aligned_alloc(64, round_up(4 * n, 64))));
        size = n;
    }
    return memory.get();
}
