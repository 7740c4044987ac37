// Causal attention over a paged KV cache, with the softmax put together from parts (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022).
//
// A job is some TILE_ROWS query rows that share a KV head: a few neighbouring tokens of one request, times the query heads
// of the group. It goes over the request's keys span by span:
//
//     position   0             256            512            768
//                |   span 0    |    span 1    |    span 2    | ..
//                  m, l, o         m, l, o         m, l, o         m: largest score, l: sum of e^(score - m),
//     total        -------> merge -------> merge -------> merge    o: sum of e^(score - m) * value
//
// Spans are cut by absolute position and merged in order. What a row must not see has weight 0, which changes no bit of
// its sums. So the result of a row does not depend on its chunk, on its neighbours, on the page size, or on whether its
// spans are done by one thread in turn or by several at once.
#pragma once

#include "gemm.h"

#include <vector>

constexpr int64_t SPAN = 256;
constexpr int64_t TILE_ROWS = 4 * MR;
constexpr int64_t AHEAD = 2 * WIDTH;  // positions between the fetch of a key and its use
static_assert(SPAN % NR == 0);

// Transposes a square of vectors: interleaving its two halves log2(WIDTH) times is a transposition.
static inline void transpose(vec (&rows)[WIDTH]) {
    ivec low, high;
    for (int i = 0; i < WIDTH; i++) {
        low[i] = i / 2 + (i % 2 ? WIDTH : 0);
        high[i] = low[i] + WIDTH / 2;
    }
#pragma GCC unroll 4
    for (int step = 1; step < WIDTH; step *= 2) {
        vec next[WIDTH];
#pragma GCC unroll 8
        for (int i = 0; i < WIDTH / 2; i++) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + WIDTH / 2], low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + WIDTH / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) rows[i] = next[i];
    }
}

// c (ROWS, NR) = a b, for weights a (ROWS, count), whose rows are SPAN apart, and rows of values b anywhere in memory.
template <int ROWS>
static void weigh(int64_t count, const float* __restrict a, const float* const* b, int64_t column, float* __restrict c,
                  int64_t ldc) {
    vec low[ROWS]{}, high[ROWS]{};
    for (int64_t i = 0; i < count; i++) {
        vec b_low = load(b[i] + column), b_high = load(b[i] + column + WIDTH);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
            vec x = splat(a[m * SPAN + i]);
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

typedef void (*Weigh)(int64_t count, const float* a, const float* const* b, int64_t column, float* c, int64_t ldc);

template <int... LESS>
constexpr std::array<Weigh, MR + 1> make_weigh(std::integer_sequence<int, LESS...>) {
    return {nullptr, weigh<LESS + 1>...};
}
constexpr auto WEIGH = make_weigh(std::make_integer_sequence<int, MR>());

// Query rows of one request and one KV head: row i is token first + i / group, query head kv_head * group + i % group.
struct Job {
    int64_t request, kv_head, first, tokens;  // tokens first .. first + tokens - 1 of the batch
    int64_t position;                         // of the first one
    int64_t begin;                            // the earliest position that any row sees
    int64_t end() const { return position + tokens; }
    int64_t first_span() const { return begin / SPAN; }
    int64_t spans() const { return (end() - 1) / SPAN + 1 - first_span(); }
};

// m, l and o of the picture above, for some rows.
struct Partial {
    float *m, *l, *o;  // (rows), (rows), (rows, padded dim)
    static int64_t size(int64_t rows, int64_t dim) { return rows * (2 + dim); }
    Partial(float* memory, int64_t rows) : m(memory), l(m + rows), o(l + rows) {}
    void clear(int64_t rows, int64_t dim) {
        std::fill_n(m, rows, -INFINITY);
        std::fill_n(l, rows * (1 + dim), 0.0f);
    }
};

struct Attention {
    const float* q;  // (tokens, heads, dim), the last dimension contiguous
    int64_t token_stride, head_stride;
    const float *keys, *values;  // of this layer: (slots, kv_heads, dim)
    float* out;                  // (tokens, heads, dim)
    int64_t heads, kv_heads, dim;
    float scale;
    int64_t window;        // a token sees this many, itself included; 0: all
    const int32_t* table;  // (any rows, table_stride)
    int64_t table_stride, page_size;
    const int32_t *rows, *cached, *cu_new;  // (requests), (requests), (requests + 1)
    int64_t requests;

    int64_t group() const { return heads / kv_heads; }
    int64_t padded() const { return round_up(dim, NR); }
    int64_t job_tokens() const { return std::max<int64_t>(1, TILE_ROWS / group()); }
    int64_t max_rows() const { return job_tokens() * group(); }

    // A thread's memory for one job at a time.
    struct Scratch {
        float *query, *key, *score;  // packed tiles of (dim, rows); panels of (dim, NR positions); (rows, SPAN)
        float *copy, *zeros;         // (SPAN, padded dim), (padded dim)
        float *total, *part;         // two Partials
        explicit Scratch(const Attention& a) {
            int64_t partial = Partial::size(a.max_rows(), a.padded());
            query = scratch<Scratch>(a.max_rows() * (a.dim + SPAN) + SPAN * (a.dim + a.padded()) + a.padded() + 2 * partial);
            key = query + a.max_rows() * a.dim;
            score = key + SPAN * a.dim;
            copy = score + SPAN * a.max_rows();
            zeros = copy + SPAN * a.padded();
            total = zeros + a.padded();
            part = total + partial;
            std::fill_n(zeros, a.padded(), 0.0f);
        }
    };

    std::vector<Job> jobs() const {
        std::vector<Job> list;
        for (int64_t r = 0; r < requests; r++)
            for (int64_t first = cu_new[r]; first < cu_new[r + 1]; first += job_tokens()) {
                int64_t tokens = std::min(job_tokens(), cu_new[r + 1] - first);
                int64_t position = cached[r] + first - cu_new[r];
                int64_t begin = window ? std::max<int64_t>(0, position - window + 1) : 0;
                for (int64_t h = 0; h < kv_heads; h++) list.push_back({r, h, first, tokens, position, begin});
            }
        // Long ones first, so that the threads finish at about the same time.
        std::stable_sort(list.begin(), list.end(), [](const Job& a, const Job& b) { return a.spans() > b.spans(); });
        return list;
    }

    void pack_query(const Job& job, float* query) const {
        Cut cut(job.tokens * group());
        for (int64_t t = 0; t < cut.count; t++)
            for (int64_t i = 0; i < cut.rows(t); i++) {
                int64_t row = cut.begin(t) + i, head = job.kv_head * group() + row % group();
                const float* source = q + (job.first + row / group()) * token_stride + head * head_stride;
                for (int64_t d = 0; d < dim; d++) query[cut.begin(t) * dim + d * cut.rows(t) + i] = source[d];
            }
    }

    // Finds positions begin .. begin + count - 1 in the pages: their keys go into panels, their values stay where they are
    // if they can be read in whole vectors there. What no row may see is never read, zeros stand for it.
    void gather(const Job& job, int64_t begin, int64_t count, const Scratch& s, const float** value_rows) const {
        const int32_t* pages = table + rows[job.request] * table_stride;
        const float* key_rows[SPAN + AHEAD];
        for (int64_t i = 0; i < count; i++) {
            int64_t position = begin + i, slot = pages[position / page_size] * page_size + position % page_size;
            int64_t offset = (slot * kv_heads + job.kv_head) * dim;
            bool seen = position >= job.begin;
            key_rows[i] = seen ? keys + offset : s.zeros;
            value_rows[i] = seen ? values + offset : s.zeros;
        }
        std::fill(key_rows + count, key_rows + round_up(count, WIDTH) + AHEAD, s.zeros);
        std::fill(value_rows + count, value_rows + round_up(count, WIDTH), s.zeros);
        for (int64_t i = 0; i < count; i += WIDTH)
            for (int64_t d = 0; d < dim; d += WIDTH) {
                vec square[WIDTH];
                // A head's rows lie too far apart for the hardware to foresee the next one.
                for (int64_t j = 0; j < WIDTH; j++) {
                    __builtin_prefetch(key_rows[i + j + AHEAD] + d, 0, 2);
                    __builtin_prefetch(value_rows[i + j] + d, 0, 2);
                }
                for (int64_t j = 0; j < WIDTH; j++) square[j] = load_some(key_rows[i + j] + d, dim - d);
                transpose(square);
                float* panel = s.key + i / NR * NR * dim + i % NR;
                for (int64_t j = 0; j < std::min<int64_t>(WIDTH, dim - d); j++) store(panel + (d + j) * NR, square[j]);
            }
        if (dim % NR == 0) return;
        for (int64_t i = 0; i < count; i++) {
            float* copy = s.copy + i * padded();
            std::fill(std::copy_n(value_rows[i], dim, copy), copy + padded(), 0.0f);
            value_rows[i] = copy;
        }
    }

    // Turns a row of scores (count) into weights, of which it may have first .. last; sets its m and l.
    void soften(float* score, int64_t count, int64_t first, int64_t last, float& m, float& l) const {
        vec highest = splat(-INFINITY), total{};
        ivec index;
        for (int i = 0; i < WIDTH; i++) index[i] = i;
        bool all = first <= 0 && last >= round_up(count, WIDTH) - 1;
        for (int64_t i = 0; i < count; i += WIDTH, index += WIDTH) {
            vec s = load(score + i) * splat(scale);
            if (!all) s = (index >= (int32_t)first) & (index <= (int32_t)last) ? s : splat(-INFINITY);
            store(score + i, s);
            highest = maximum(highest, s);
        }
        m = maximum(highest);
        // A row that sees nothing here must not get infinity minus infinity, which is NaN.
        vec base = splat(m == -INFINITY ? 0.0f : m);
        for (int64_t i = 0; i < count; i += WIDTH) {
            vec p = exp(load(score + i) - base);
            store(score + i, p);
            total += p;
        }
        l = sum(total);
    }

    void attend(const Job& job, int64_t span, const Scratch& s, Partial part) const {
        int64_t begin = std::max(span * SPAN, job.begin / WIDTH * WIDTH), end = std::min((span + 1) * SPAN, job.end());
        int64_t count = end - begin, job_rows = job.tokens * group();
        const float* value_rows[SPAN];
        gather(job, begin, count, s, value_rows);
        Cut cut(job_rows);
        for (int64_t column = 0; column < count; column += NR)
            for (int64_t t = 0; t < cut.count; t++)
                TILES[cut.rows(t)](dim, s.query + cut.begin(t) * dim, s.key + column * dim,
                                   s.score + cut.begin(t) * SPAN + column, SPAN, false);
        for (int64_t i = 0; i < job_rows; i++) {
            int64_t last = job.position + i / group() - begin, first = window ? last - window + 1 : 0;
            soften(s.score + i * SPAN, count, first, last, part.m[i], part.l[i]);
        }
        for (int64_t column = 0; column < padded(); column += NR)
            for (int64_t t = 0; t < cut.count; t++)
                WEIGH[cut.rows(t)](count, s.score + cut.begin(t) * SPAN, value_rows, column,
                                   part.o + cut.begin(t) * padded() + column, padded());
    }

    // total = total and then part; with nothing in one of them, the other bit for bit.
    void merge(int64_t job_rows, Partial total, Partial part) const {
        for (int64_t i = 0; i < job_rows; i++) {
            float m = std::max(total.m[i], part.m[i]);
            if (m == -INFINITY) continue;
            vec a = exp(splat(total.m[i] - m)), b = exp(splat(part.m[i] - m));
            for (int64_t d = i * padded(); d < (i + 1) * padded(); d += WIDTH)
                store(total.o + d, fma(load(part.o + d), b, load(total.o + d) * a));
            total.l[i] = total.l[i] * a[0] + part.l[i] * b[0];
            total.m[i] = m;
        }
    }

    void finish(const Job& job, Partial total) const {
        for (int64_t i = 0; i < job.tokens * group(); i++) {
            vec weight = splat(1.0f / total.l[i]);
            float* to = out + ((job.first + i / group()) * heads + job.kv_head * group() + i % group()) * dim;
            for (int64_t d = 0; d < dim; d += WIDTH)
                store_some(to + d, load(total.o + i * padded() + d) * weight, dim - d);
        }
    }

    void run(int64_t threads) const {
        std::vector<Job> list = jobs();
        if (list.empty()) return;
        int64_t longest = list.front().spans();
        if (threads > 1 && longest > 1 && (int64_t)list.size() < 4 * threads)
            run_by_span(list, longest, threads);
        else
            pool().run(list.size(), threads, [&](int64_t j) { run_job(list[j]); });
    }

    void run_job(const Job& job) const {
        Scratch s(*this);
        int64_t job_rows = job.tokens * group();
        Partial total(s.total, job_rows), part(s.part, job_rows);
        total.clear(job_rows, padded());
        pack_query(job, s.query);
        for (int64_t i = 0; i < job.spans(); i++) {
            attend(job, job.first_span() + i, s, part);
            merge(job_rows, total, part);
        }
        finish(job, total);
    }

    // For fewer jobs than keep the threads busy: `wave` spans of each job at once, then their merge in order.
    void run_by_span(const std::vector<Job>& list, int64_t longest, int64_t threads) const {
        int64_t count = list.size(), wave = std::min<int64_t>(longest, (8 * threads + count - 1) / count);
        int64_t size = Partial::size(max_rows(), padded());
        struct Wave;
        float* memory = scratch<Wave>(count * (wave + 1) * size);
        auto partial = [&](int64_t j, int64_t i) {
            return Partial(memory + (j * (wave + 1) + i) * size, list[j].tokens * group());
        };
        for (int64_t base = 0; base < longest; base += wave) {
            pool().run(count * wave, threads, [&](int64_t unit) {
                int64_t j = unit / wave, i = unit % wave;
                if (base + i >= list[j].spans()) return;
                Scratch s(*this);
                pack_query(list[j], s.query);
                attend(list[j], list[j].first_span() + base + i, s, partial(j, i));
            });
            pool().run(count, threads, [&](int64_t j) {
                int64_t job_rows = list[j].tokens * group();
                if (base == 0) partial(j, wave).clear(job_rows, padded());
                for (int64_t i = 0; i < std::min(wave, list[j].spans() - base); i++)
                    merge(job_rows, partial(j, wave), partial(j, i));
                if (base + wave >= longest) finish(list[j], partial(j, wave));
            });
        }
    }
};
