// Numbers of the compiled functions: bfloat16, a register's worth of floats, exponentials.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
constexpr int64_t MANY = 1 << 14;  // numbers from which threads pay: they wait for each other

struct bfloat16 {
    uint16_t bits;
};

inline float wide(float x) { return x; }
inline float wide(bfloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

template <class T> T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bfloat16 narrow<bfloat16>(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    return {static_cast<uint16_t>(x == x ? rounded : 0x7fc0)};            // rounding could make a NaN infinite
}

// LANES numbers in a register (or as many as it takes): a compiler's own vectors of them were left in memory.
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Lanes load(const float* at) {
    Lanes found;
    std::memcpy(&found, at, sizeof found);
    return found;
}
inline Lanes load(const bfloat16* at) {
    Halves bits;
    std::memcpy(&bits, at, sizeof bits);
    return std::bit_cast<Lanes>(__builtin_convertvector(bits, Words) << 16);
}
inline void store(float* at, Lanes lanes) { std::memcpy(at, &lanes, sizeof lanes); }

// Weights of a product x (rows, depth) times W' for W (outputs, depth), plus a bias (outputs,) or null: of the
// product's type, laid out as dots.h or tiles.h has them.
struct Matrix {
    const void *weights, *bias;
    int64_t outputs, depth;
};

// e^x for |x| up to 87, clamped beyond; within 2 units in the last place (Cephes, expf). A NaN stays one.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (p * r * r + r + 1.0f) * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// u with x sigmoid(u) = 0.5 x (1 + tanh(u / 2)), the GELU by tanh.
inline float gelu_argument(float x) { return 1.59576912161f * (x + 0.044715f * x * x * x); }

template <class T> float mean_square(const T* x, int64_t width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += wide(x[i]) * wide(x[i]);
    return sum / static_cast<float>(width);
}

}  // namespace
