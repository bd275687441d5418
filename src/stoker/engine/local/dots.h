// Products of few rows with float32 weights as the model has them, on a processor with AVX-512: x (rows, K) times W' for
// W (N, K).
//
// With few rows a product costs what reading its weights costs: they are read once, from where they lie, and fetched a few
// outputs ahead. Sums are float32, each register's lane over every 16th of K, so that a row's are the same beside any others.

#pragma once

#include "numbers.h"

#if defined(__AVX512F__)

#define STOKER_DOTS

#include <algorithm>

#include <immintrin.h>

namespace {

constexpr int64_t DOT_ROWS = 6, DOT_OUTPUTS = 4;  // 24 sums, 4 weights and an input: a processor's 32 registers

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

// R rows by 4 outputs. `ahead`: numbers from a weight to the one to fetch; 0: none.
template <int R>
inline void dots(const float* x, const float* weights, int64_t depth, int64_t ahead, const float* bias, float* out,
                 int64_t outputs) {
    Lanes sums[R][DOT_OUTPUTS] = {};
    for (int64_t k = 0; k < depth; k += LANES) {
        Lanes w[DOT_OUTPUTS];
        for (int64_t n = 0; n < DOT_OUTPUTS; ++n) {
            const float* at = weights + n * depth + k;
            w[n] = load(at);
            if (ahead) _mm_prefetch(reinterpret_cast<const char*>(at + ahead), _MM_HINT_T0);
        }
        for (int r = 0; r < R; ++r) {
            const Lanes input = load(x + r * depth + k);
            for (int64_t n = 0; n < DOT_OUTPUTS; ++n) sums[r][n] += input * w[n];
        }
    }
    for (int r = 0; r < R; ++r) {
        float found[DOT_OUTPUTS];
        _mm_storeu_ps(found, sum_lanes(sums[r]));
        for (int64_t n = 0; n < DOT_OUTPUTS; ++n) out[r * outputs + n] = found[n] + (bias ? bias[n] : 0.0f);
    }
}

// This thread's part. K is a multiple of 16, N one of 4; `bias` (N) or none; `out` (rows, N).
void multiply_rows(const float* x, int64_t rows, const float* weights, const float* bias, int64_t depth, int64_t outputs,
                   float* out) {
    constexpr decltype(&dots<1>) by_rows[] = {dots<1>, dots<2>, dots<3>, dots<4>, dots<5>, dots<6>};
    const int64_t pieces = (rows + DOT_ROWS - 1) / DOT_ROWS;
#pragma omp for schedule(static) nowait
    for (int64_t n = 0; n < outputs; n += DOT_OUTPUTS) {
        for (int64_t piece = 0; piece < pieces; ++piece) {  // of equal height, as far as they can be
            const int64_t start = rows * piece / pieces, stop = rows * (piece + 1) / pieces;
            by_rows[stop - start - 1](x + start * depth, weights + n * depth, depth, piece ? 0 : DOT_OUTPUTS * depth,
                                      bias ? bias + n : nullptr, out + start * outputs + n, outputs);
        }
    }
}

}  // namespace

extern "C" int has_dots() { return 1; }

#else

extern "C" int has_dots() { return 0; }

#endif
