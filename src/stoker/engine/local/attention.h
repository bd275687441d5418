// Attention of each row's newest token to its prompt and its own answer, whose keys and values are kept apart: rows of
// one prompt share it.
//
// B rows, K key-value heads, G query heads of each, D head dimension.

#pragma once

#include <algorithm>
#include <vector>

#include "numbers.h"

namespace {

constexpr int AT_ONCE = 4;  // query heads that share a reading of their keys
constexpr int64_t MOST_DIMS = 512;

// RMSNorm. Weight null: none.
struct Norm {
    const float* weight;
    float eps;
};

// The rows of a step.
struct Rows {
    const int64_t *prompts, *lengths, *starts;  // (B,) which prompt, its length, the row's first column
    int64_t rows, column;                       // B; the column that the new tokens are kept in
    int64_t heads, group, dim;                  // K, G, D
    int64_t own_room, shared_room;              // of the caches
    int32_t threads;
};

// One layer's attention.
struct Attention {
    Norm query_norm, key_norm;                // of each head
    const void *cosines, *sines;              // (positions, D), the sines signed
    void *own_keys, *own_values;              // (rows, K, D, own_room), (rows, K, own_room, D)
    const void *shared_keys, *shared_values;  // (prompts, K, D, shared_room), (prompts, K, shared_room, D)
    int64_t window;                           // tokens that a query sees, itself included; 0: all
    float scale, softcap;                     // softcap 0: none
};

// A layer's products for the new tokens: (B, K G D), (B, K D), (B, K D), their rows `stride` apart.
template <class T> struct Heads {
    const T *query, *key, *value;
    int64_t query_stride, key_stride, value_stride;
};

// Rotary embedding of one head, normed before: the half turned in carries the sign of `sin`.
template <class T>
void turn(const T* head, const Norm& norm, const T* cos, const T* sin, float scale, float* out, int64_t dim) {
    float in[MOST_DIMS];
    for (int64_t d = 0; d < dim; ++d) in[d] = wide(head[d]);
    if (norm.weight != nullptr) {
        const float root = 1.0f / std::sqrt(mean_square(head, dim) + norm.eps);
        for (int64_t d = 0; d < dim; ++d) in[d] *= root * norm.weight[d];
    }
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; ++d) out[d] = (in[d] * wide(cos[d]) + in[d + half] * wide(sin[d])) * scale;
    for (int64_t d = half; d < dim; ++d) out[d] = (in[d] * wide(cos[d]) + in[d - half] * wide(sin[d])) * scale;
}

// Scores of N queries (N, D) against keys (D, room) from place `from` (a multiple of LANES) to `to`, LANES at a time:
// row n of `scores` (N, stride), counted from `from`. What lies beyond `to` is written, too.
template <class T, int N>
void score(const float* query, int64_t dim, const T* keys, int64_t room, int64_t from, int64_t to, float* scores,
           int64_t stride, int64_t ahead) {
    for (int64_t place = from; place < to; place += LANES) {
        Lanes sum[N] = {};
        for (int64_t d = 0; d < dim; ++d) {
            const T* at = keys + d * room + place;
            __builtin_prefetch(at + ahead, 0, 2);
            const Lanes key = load(at);
            for (int n = 0; n < N; ++n) sum[n] += query[n * dim + d] * key;
        }
        for (int n = 0; n < N; ++n) store(scores + n * stride + (place - from), sum[n]);
    }
}

// out (N, D) += weights (N, stride) times values (count, D), WIDE x LANES dimensions at a time.
template <class T, int N, int WIDE>
void gather(const float* weights, int64_t stride, const T* values, int64_t count, float* out, int64_t dim,
            int64_t ahead) {
    for (int64_t block = 0; block < dim; block += WIDE * LANES) {
        Lanes sum[N][WIDE];
        for (int n = 0; n < N; ++n)
            for (int w = 0; w < WIDE; ++w) sum[n][w] = load(out + n * dim + block + w * LANES);
        for (int64_t t = 0; t < count; ++t) {
            Lanes value[WIDE];
            for (size_t w = 0; w < WIDE * LANES * sizeof(T); w += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(values + t * dim + block + ahead) + w, 0, 2);
            for (int w = 0; w < WIDE; ++w) value[w] = load(values + t * dim + block + w * LANES);
            for (int n = 0; n < N; ++n)
                for (int w = 0; w < WIDE; ++w) sum[n][w] += weights[n * stride + t] * value[w];
        }
        for (int n = 0; n < N; ++n)
            for (int w = 0; w < WIDE; ++w) store(out + n * dim + block + w * LANES, sum[n][w]);
    }
}

// The same where dimensions don't fill lanes.
template <class T, int N>
void gather_any(const float* weights, int64_t stride, const T* values, int64_t count, float* out, int64_t dim) {
    for (int64_t t = 0; t < count; ++t)
        for (int n = 0; n < N; ++n)
            for (int64_t d = 0; d < dim; ++d) out[n * dim + d] += weights[n * stride + t] * wide(values[t * dim + d]);
}

// Some of a head's keys and values, of places from `first` to `last`.
template <class T> struct Part {
    const T *keys, *values;  // (D, room), (room, D)
    int64_t room, first, last;
    int64_t ahead;  // how far on the next task's are, to be fetched meanwhile
    int64_t from() const { return first / LANES * LANES; }
    int64_t lanes() const { return first < last ? (last - from() + LANES - 1) / LANES * LANES : 0; }
};

// Softmax over the places of both parts, without those that are only there to fill lanes. Weights are left
// unnormalised; their sum.
template <class T> float weigh(float* weights, const Part<T> (&parts)[2], float softcap) {
    float best = -INFINITY, sum = 0.0f;
    float* of_part = weights;
    for (const auto& part : parts) {
        float* at = of_part - part.from();
        if (softcap != 0.0f) {
#pragma omp simd
            for (int64_t t = part.first; t < part.last; ++t)
                at[t] = softcap * (2.0f * sigmoid(2.0f * at[t] / softcap) - 1.0f);
        }
#pragma omp simd reduction(max : best)
        for (int64_t t = part.first; t < part.last; ++t) best = at[t] > best ? at[t] : best;
        of_part += part.lanes();
    }
    of_part = weights;
    for (const auto& part : parts) {
        float* at = of_part - part.from();
#pragma omp simd reduction(+ : sum)
        for (int64_t t = part.first; t < part.last; ++t) {
            // Less than e^-60 is nothing beside the best, but times a value it could be a number too small for full
            // speed.
            const float below = at[t] - best;
            at[t] = below < -60.0f ? 0.0f : exponential(below);
            sum += at[t];
        }
        of_part += part.lanes();
    }
    return sum;
}

// N query heads of one row and key-value head: query (N, D), room for scores, what they see (N, D).
template <class T, int N>
void see(const float* query, int64_t dim, const Part<T> (&parts)[2], float softcap, float* scores, T* seen) {
    const int64_t stride = parts[0].lanes() + parts[1].lanes();
    float* of_part = scores;
    for (const auto& part : parts) {
        score<T, N>(query, dim, part.keys, part.room, part.from(), part.first < part.last ? part.last : part.from(),
                    of_part, stride, part.ahead);
        of_part += part.lanes();
    }
    float sums[N], mixed[N * MOST_DIMS] = {};
    for (int n = 0; n < N; ++n) sums[n] = weigh(scores + n * stride, parts, softcap);
    of_part = scores;
    for (const auto& part : parts) {
        const float* weights = of_part + (part.first - part.from());
        const T* values = part.values + part.first * dim;
        const int64_t count = part.last - part.first;
        if (dim % (4 * LANES) == 0)
            gather<T, N, 4>(weights, stride, values, count, mixed, dim, part.ahead);
        else if (dim % LANES == 0)
            gather<T, N, 1>(weights, stride, values, count, mixed, dim, part.ahead);
        else
            gather_any<T, N>(weights, stride, values, count, mixed, dim);
        of_part += part.lanes();
    }
    for (int n = 0; n < N; ++n)
        for (int64_t d = 0; d < dim; ++d) seen[n * dim + d] = narrow<T>(mixed[n * dim + d] / sums[n]);
}

template <class T>
void attend_one(const Attention& a, const Rows& r, const Heads<T>& heads, T* seen, int64_t row, int64_t head) {
    const int64_t dim = r.dim, length = r.lengths[row], start = r.starts[row], position = length + r.column - start;
    const T* cos = static_cast<const T*>(a.cosines) + position * dim;
    const T* sin = static_cast<const T*>(a.sines) + position * dim;

    const int64_t own_place = (row * r.heads + head) * r.own_room * dim;
    T* own_keys = static_cast<T*>(a.own_keys) + own_place;
    T* own_values = static_cast<T*>(a.own_values) + own_place;
    float turned[MOST_DIMS];
    turn(heads.key + row * heads.key_stride + head * dim, a.key_norm, cos, sin, 1.0f, turned, dim);
    for (int64_t d = 0; d < dim; ++d) own_keys[d * r.own_room + r.column] = narrow<T>(turned[d]);
    std::copy_n(heads.value + row * heads.value_stride + head * dim, dim, own_values + r.column * dim);

    const int64_t shared_place = (r.prompts[row] * r.heads + head) * r.shared_room * dim;
    const int64_t from = a.window ? std::clamp<int64_t>(position - a.window + 1, 0, length) : 0;
    const int64_t first = a.window ? std::max(start, r.column - a.window + 1) : start;
    const Part<T> parts[2] = {
        {static_cast<const T*>(a.shared_keys) + shared_place, static_cast<const T*>(a.shared_values) + shared_place,
         r.shared_room, from, length, 0},
        {own_keys, own_values, r.own_room, first, r.column + 1, r.heads * r.own_room * dim},
    };

    thread_local std::vector<float> room;
    room.resize(AT_ONCE * (dim + parts[0].lanes() + parts[1].lanes()));
    float *query = room.data(), *scores = query + AT_ONCE * dim;
    for (int64_t g = 0; g < r.group; g += AT_ONCE) {
        const int64_t some = std::min<int64_t>(AT_ONCE, r.group - g), place = head * r.group + g;
        const T* asked = heads.query + row * heads.query_stride + place * dim;
        for (int64_t n = 0; n < some; ++n) turn(asked + n * dim, a.query_norm, cos, sin, a.scale, query + n * dim, dim);
        T* to = seen + (row * r.heads * r.group + place) * dim;
        switch (some) {
            case 1: see<T, 1>(query, dim, parts, a.softcap, scores, to); break;
            case 2: see<T, 2>(query, dim, parts, a.softcap, scores, to); break;
            case 3: see<T, 3>(query, dim, parts, a.softcap, scores, to); break;
            default: see<T, 4>(query, dim, parts, a.softcap, scores, to);
        }
    }
}

// What the new tokens see, (B, K G D). For all threads of a team.
template <class T> void attend(const Attention& a, const Rows& r, const Heads<T>& heads, T* seen) {
    // Head by head, so that rows of one prompt find its keys in the processor's cache.
#pragma omp for schedule(dynamic, 4)
    for (int64_t task = 0; task < r.rows * r.heads; ++task)
        attend_one<T>(a, r, heads, seen, task % r.rows, task / r.rows);
}

}  // namespace
