// What an update on a CPU computes between its products: norms and the MLP's gate, forward and backward, attention's
// backward pass, and sums of gradients.
//
// Called through a C interface (fused.py, block_attention.py, optim.py), for float32 and bfloat16; every sum is float32,
// and a result is rounded once. Which numbers are summed in which order hangs on shapes alone, so threads change no bit.

#include <algorithm>

#include "numbers.h"

namespace {

constexpr int64_t BLOCK = 64;        // rows whose part of a weight's gradient is summed in one go; fused.py has it, too

// out = x / rms(x) * (weight + offset); scales: 1 / rms of each row, for the backward pass.
template <class T>
void norm(const T* x, const T* weight, float offset, float eps, T* out, float* scales, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T* at = x + row * width;
        T* to = out + row * width;
        const float scale = 1.0f / std::sqrt(mean_square(at, width) + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) to[i] = narrow<T>(wide(at[i]) * scale * (wide(weight[i]) + offset));
        scales[row] = scale;
    }
}

template <class T>
void norm_row_back(const T* grad, const T* x, const T* weight, float offset, float scale, T* dx, int64_t width) {
    float along = 0.0f;  // what of the gradient only changes a row's length, which the norm takes away
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < width; ++i) along += wide(grad[i]) * (wide(weight[i]) + offset) * wide(x[i]);
    const float back = along * scale * scale / static_cast<float>(width);
#pragma omp simd
    for (int64_t i = 0; i < width; ++i)
        dx[i] = narrow<T>(scale * (wide(grad[i]) * (wide(weight[i]) + offset) - wide(x[i]) * back));
}

// dx, and where `sums` (blocks, width) isn't null, each block's part of the weight's gradient.
template <class T>
void norm_back(const T* grad, const T* x, const T* weight, float offset, const float* scales, T* dx, float* sums,
               int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t block = 0; block < (rows + BLOCK - 1) / BLOCK; ++block) {
        float* sum = sums == nullptr ? nullptr : sums + block * width;
        if (sum != nullptr) std::fill_n(sum, width, 0.0f);
        for (int64_t row = block * BLOCK; row < std::min(rows, (block + 1) * BLOCK); ++row) {
            const T *g = grad + row * width, *at = x + row * width;
            const float scale = scales[row];
            norm_row_back(g, at, weight, offset, scale, dx + row * width, width);
            if (sum == nullptr) continue;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) sum[i] += wide(g[i]) * wide(at[i]) * scale;
        }
    }
}

// f(x) and its slope: the SiLU, x sigmoid(x), or the GELU by tanh, x sigmoid(u(x)).
struct Activation {
    float value, slope;
};

template <bool GELU> inline Activation activate(float x) {
    const float s = sigmoid(GELU ? gelu_argument(x) : x);
    const float du = GELU ? 1.59576912161f + 0.21406445f * x * x : 1.0f;
    return {x * s, s + x * s * (1.0f - s) * du};
}

// Gradients of f(gate) * up. For all threads of a team.
template <class T, bool GELU>
void gated_back(const T* grad, const T* gate, const T* up, T* dgate, T* dup, int64_t count) {
#pragma omp for simd schedule(static)
    for (int64_t i = 0; i < count; ++i) {
        const Activation f = activate<GELU>(wide(gate[i]));
        dgate[i] = narrow<T>(wide(grad[i]) * wide(up[i]) * f.slope);
        dup[i] = narrow<T>(wide(grad[i]) * f.value);
    }
}

// Mask of attention scores (N, 1, Q or 1, T): how far apart its rows are, 0 where they are one.
struct Mask {
    const float* at;
    int64_t between_blocks, between_queries;
};

// One row of an attention's backward pass: probabilities from scores (T,), and from what changes the probabilities what
// changes the scores. `weight`: log-sum-exp of the scaled scores, `delta`: gradient times what was seen, of the row.
template <class T>
void attention_row_back(T* scores, T* change, const float* mask, float weight, float delta, float scale, int64_t keys) {
#pragma omp simd
    for (int64_t t = 0; t < keys; ++t) {
        const float x = wide(scores[t]) * scale + (mask == nullptr ? 0.0f : mask[t]) - weight;
        const float p = x < -60.0f ? 0.0f : exponential(x);  // numbers too small for full speed are nothing here
        scores[t] = narrow<T>(p);
        change[t] = narrow<T>(p * (wide(change[t]) - delta) * scale);
    }
}

// Of all rows, (N, K, Q, T). For all threads of a team.
template <class T>
void attention_back(T* scores, T* change, const float* weights, const float* deltas, const Mask& mask, float scale,
                    int64_t blocks, int64_t heads, int64_t queries, int64_t keys) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < blocks * heads * queries; ++row) {
        const int64_t block = row / (heads * queries), query = row % queries;
        const float* masked = mask.at;
        if (masked != nullptr) masked += block * mask.between_blocks + query * mask.between_queries;
        attention_row_back(scores + row * keys, change + row * keys, masked, weights[row], deltas[row], scale, keys);
    }
}

}  // namespace

#define STOKER_EXPORT(T, NAME)                                                                                         \
    void norm_##NAME(const T* x, const T* weight, float offset, float eps, T* out, float* scales, int64_t rows,        \
                     int64_t width, int threads) {                                                                     \
        _Pragma("omp parallel num_threads(threads) if (rows * width >= MANY)")                                         \
        norm(x, weight, offset, eps, out, scales, rows, width);                                                        \
    }                                                                                                                  \
    void norm_back_##NAME(const T* grad, const T* x, const T* weight, float offset, const float* scales, T* dx,        \
                          float* sums, int64_t rows, int64_t width, int threads) {                                     \
        _Pragma("omp parallel num_threads(threads) if (rows * width >= MANY)")                                         \
        norm_back(grad, x, weight, offset, scales, dx, sums, rows, width);                                             \
    }                                                                                                                  \
    void gated_back_##NAME(const T* grad, const T* gate, const T* up, int gelu, T* dgate, T* dup, int64_t count,       \
                           int threads) {                                                                              \
        _Pragma("omp parallel num_threads(threads) if (count >= MANY)") {                                              \
            if (gelu)                                                                                                  \
                gated_back<T, true>(grad, gate, up, dgate, dup, count);                                                \
            else                                                                                                       \
                gated_back<T, false>(grad, gate, up, dgate, dup, count);                                               \
        }                                                                                                              \
    }                                                                                                                  \
    void attention_back_##NAME(T* scores, T* change, const float* weights, const float* deltas, const Mask* mask,      \
                               float scale, int64_t blocks, int64_t heads, int64_t queries, int64_t keys,              \
                               int threads) {                                                                          \
        _Pragma("omp parallel num_threads(threads) if (blocks * heads * queries * keys >= MANY)")                      \
        attention_back(scores, change, weights, deltas, *mask, scale, blocks, heads, queries, keys);                   \
    }

extern "C" {
STOKER_EXPORT(float, float32)
STOKER_EXPORT(bfloat16, bfloat16)

// sum += scale * x, without a float32 copy of x.
void accumulate(float* sum, const bfloat16* x, float scale, int64_t count, int threads) {
#pragma omp parallel for simd num_threads(threads) if (parallel : count >= MANY)
    for (int64_t i = 0; i < count; ++i) sum[i] += scale * wide(x[i]);
}
}
