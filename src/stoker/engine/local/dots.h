// Products of few rows on a processor with AVX-512, with the weights as the model has them: x (rows, K) times W' for
// W (N, K).
//
// With few rows a product costs what reading its weights costs: they are read once, from where they lie, and fetched a
// few outputs ahead. Sums are float32, each register's lane over its share of K in order, rounded once, so that a row's
// are the same beside any others.

#pragma once

#include "numbers.h"

#if defined(__AVX512F__)

#define STOKER_DOTS

#include <algorithm>
#include <type_traits>

#include <immintrin.h>

namespace {

constexpr int64_t DOT_ROWS = 6, DOT_OUTPUTS = 4;  // 24 sums, 4 weights and an input: a processor's 32 registers
constexpr int64_t DOT_BLOCK = 16;                 // outputs that some rows meet while they are in the processor's cache

// 16 weights. A register holds 32 of bfloat16, two to a word: those of even places are its words moved up, those of odd
// places its words without what is below.
template <class T> constexpr int64_t HALVES = sizeof(float) / sizeof(T);
inline Lanes weights_at(const float* at, int) { return load(at); }
inline Lanes weights_at(const bfloat16* at, int half) {
    Words words;
    std::memcpy(&words, at, sizeof words);
    return std::bit_cast<Lanes>(half ? words & 0xffff0000u : words << 16);
}

// (1, 4) of the lanes of four registers, summed.
inline __m128 sum_lanes(const Lanes (&of)[DOT_OUTPUTS]) {
    const __m512 a = std::bit_cast<__m512>(of[0]), b = std::bit_cast<__m512>(of[1]);
    const __m512 c = std::bit_cast<__m512>(of[2]), d = std::bit_cast<__m512>(of[3]);
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xee);
    const __m512 four = _mm512_add_ps(low, high);
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(four), 1));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), upper);
    return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

// R rows by 4 outputs; x in order. `ahead`: numbers from a weight to the one to fetch; 0: none.
template <class T, int R>
inline void dots(const float* x, const T* weights, int64_t depth, int64_t ahead, const T* bias, T* out,
                 int64_t outputs) {
    Lanes sums[R][DOT_OUTPUTS] = {};
    for (int64_t k = 0; k < depth; k += HALVES<T> * LANES) {
        for (int half = 0; half < HALVES<T>; ++half) {
            Lanes w[DOT_OUTPUTS];
            for (int64_t n = 0; n < DOT_OUTPUTS; ++n) {
                const T* at = weights + n * depth + k;
                w[n] = weights_at(at, half);
                if (half == 0 && ahead) _mm_prefetch(reinterpret_cast<const char*>(at + ahead), _MM_HINT_T0);
            }
            for (int r = 0; r < R; ++r) {
                const Lanes input = load(x + r * depth + k + half * LANES);
                for (int64_t n = 0; n < DOT_OUTPUTS; ++n) sums[r][n] += input * w[n];
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        float found[DOT_OUTPUTS];
        _mm_storeu_ps(found, sum_lanes(sums[r]));
        for (int64_t n = 0; n < DOT_OUTPUTS; ++n)
            out[r * outputs + n] = narrow<T>(found[n] + (bias ? wide(bias[n]) : 0.0f));
    }
}

// Products by `dots`, for inputs and weights of one type. The depth is a multiple of 16, of 32 for bfloat16; outputs
// one of 4.
template <class T> struct Dots {
    using Input = const float*;

    // x (rows, depth), `stride` apart, as float32 in the order of the weights: in `room` where it isn't. For all
    // threads of a team.
    static Input prepare(const T* x, int64_t stride, int64_t rows, int64_t depth, float* room) {
        if constexpr (std::is_same_v<T, float>)
            if (stride == depth) return x;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            float* to = room + row * depth;
            for (int64_t k = 0; k < depth; k += HALVES<T> * LANES)
                for (int half = 0; half < HALVES<T>; ++half, to += LANES)
                    store(to, weights_at(x + row * stride + k, half));
        }
        return room;
    }

    // This thread's part of inputs times weights, plus the bias: out (rows, outputs). Doesn't wait for the others.
    static void multiply(Input x, int64_t rows, const Matrix& w, T* out) {
        constexpr decltype(&dots<T, 1>) by_rows[] = {dots<T, 1>, dots<T, 2>, dots<T, 3>,
                                                     dots<T, 4>, dots<T, 5>, dots<T, 6>};
        const int64_t depth = w.depth, outputs = w.outputs, pieces = (rows + DOT_ROWS - 1) / DOT_ROWS;
        const T *weights = static_cast<const T*>(w.weights), *bias = static_cast<const T*>(w.bias);
#pragma omp for schedule(static) nowait
        for (int64_t first = 0; first < outputs; first += DOT_BLOCK) {
            const int64_t last = std::min(first + DOT_BLOCK, outputs);
            for (int64_t piece = 0; piece < pieces; ++piece) {  // of equal height, as far as they can be
                const int64_t start = rows * piece / pieces, stop = rows * (piece + 1) / pieces;
                for (int64_t n = first; n < last; n += DOT_OUTPUTS)
                    by_rows[stop - start - 1](x + start * depth, weights + n * depth, depth,
                                              piece ? 0 : DOT_OUTPUTS * depth, bias ? bias + n : nullptr,
                                              out + start * outputs + n, outputs);
            }
        }
    }
};

}  // namespace

extern "C" int has_dots() { return 1; }

#else

extern "C" int has_dots() { return 0; }

#endif
