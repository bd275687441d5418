// Products of few rows with bfloat16 weights on a processor with matrix tiles (AMX): x (rows, K) times W' for W (N, K).
//
// With few rows a product costs what reading its weights costs. They are packed in the order they are read in, tile by
// tile, and fetched a few tiles ahead. Sums are float32 in the order of K, rounded once.

#pragma once

#include "numbers.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)

#define STOKER_TILES

#include <algorithm>

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t ROWS = 16, COLUMNS = 16, DEPTH = 32;      // of a tile: 16 outputs, 32 of their inputs
constexpr int64_t TILE = COLUMNS * DEPTH, PAIR = 2 * TILE;  // numbers in a tile, and in the two that are read together
constexpr int64_t AHEAD = 8 * PAIR;                         // how far on weights are fetched, in numbers

struct alignas(64) Config {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3: sums, of the first and the second 16 rows by the first and the second 16 outputs. 4, 5: inputs of the
// first and the second rows. 6, 7: weights of the first and the second outputs.
void configure(int64_t first, int64_t second) {
    Config config;
    std::fill_n(config.bytes, 8, static_cast<uint16_t>(64));
    const int64_t rows[8] = {first, first, second, second, first, second, ROWS, ROWS};
    for (int tile = 0; tile < 8; ++tile) config.rows[tile] = static_cast<uint8_t>(std::max<int64_t>(rows[tile], 1));
    _tile_loadconfig(&config);
}

inline void fetch(const bfloat16* at) {
    for (int64_t line = 0; line < PAIR; line += 32) _mm_prefetch(reinterpret_cast<const char*>(at + line), _MM_HINT_T0);
}

// Up to 32 rows by 32 outputs. TWO: there are more than 16 rows.
template <bool TWO>
void block(const bfloat16* x, int64_t stride, int64_t depth, const bfloat16* weights, bool first_pass,
           float (&sums)[2 * ROWS][2 * COLUMNS]) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += DEPTH, weights += PAIR) {
        if (first_pass) fetch(weights + AHEAD);
        _tile_loadd(6, weights, 64);
        _tile_loadd(7, weights + TILE, 64);
        _tile_loadd(4, x + k, 2 * stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, x + ROWS * stride + k, 2 * stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 8 * COLUMNS);
    _tile_stored(1, sums[0] + COLUMNS, 8 * COLUMNS);
    if (TWO) {
        _tile_stored(2, sums[ROWS], 8 * COLUMNS);
        _tile_stored(3, sums[ROWS] + COLUMNS, 8 * COLUMNS);
    }
}

}  // namespace

extern "C" {

// 1 where this process may use tiles: the kernel wants to be asked, as their state is large.
int has_tiles() {
    constexpr long request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

// Weights (outputs, depth) in tiles, two and two: (outputs / 32, depth / 32, 2, 16, 16, 2), the last two indices an
// output and which of two neighbouring inputs. Outputs are filled up with zeros to a multiple of 32; `depth` is one.
void pack(const bfloat16* weights, int64_t outputs, int64_t depth, bfloat16* packed, int threads) {
    const int64_t pairs = (outputs + 2 * COLUMNS - 1) / (2 * COLUMNS);
#pragma omp parallel for num_threads(threads)
    for (int64_t pair = 0; pair < pairs; ++pair) {
        bfloat16* to = packed + pair * 2 * COLUMNS * depth;
        for (int64_t k = 0; k < depth; k += DEPTH)
            for (int64_t tile = 0; tile < 2; ++tile, to += TILE)
                for (int64_t column = 0; column < COLUMNS; ++column) {
                    const int64_t output = (2 * pair + tile) * COLUMNS + column;
                    for (int64_t two = 0; two < DEPTH / 2; ++two) {
                        uint32_t both = 0;
                        if (output < outputs) std::memcpy(&both, weights + output * depth + k + 2 * two, sizeof both);
                        std::memcpy(to + (two * COLUMNS + column) * 2, &both, sizeof both);
                    }
                }
    }
}
}  // extern "C"

namespace {

// Products of packed weights.
struct Tiles {
    struct Input {
        const bfloat16* x;
        int64_t stride;
    };

    static Input prepare(const bfloat16* x, int64_t stride, int64_t, int64_t, float*) { return {x, stride}; }

    // As in dots.h.
    static void multiply(Input in, int64_t rows, const Matrix& w, bfloat16* out) {
        const bfloat16 *packed = static_cast<const bfloat16*>(w.weights), *bias = static_cast<const bfloat16*>(w.bias);
        int64_t shape = -1;
#pragma omp for schedule(static) nowait
        for (int64_t pair = 0; pair < w.outputs / (2 * COLUMNS); ++pair) {
            const bfloat16* weights = packed + pair * 2 * COLUMNS * w.depth;
            for (int64_t row = 0; row < rows; row += 2 * ROWS) {
                const int64_t some = std::min(rows - row, 2 * ROWS);
                if (some != shape) configure(std::min(some, ROWS), some - ROWS);
                shape = some;
                alignas(64) float sums[2 * ROWS][2 * COLUMNS];
                if (some > ROWS)
                    block<true>(in.x + row * in.stride, in.stride, w.depth, weights, row == 0, sums);
                else
                    block<false>(in.x + row * in.stride, in.stride, w.depth, weights, row == 0, sums);
                for (int64_t n = 0; n < some; ++n) {
                    bfloat16* to = out + (row + n) * w.outputs + pair * 2 * COLUMNS;
                    const bfloat16* more = bias == nullptr ? nullptr : bias + pair * 2 * COLUMNS;
                    for (int64_t c = 0; c < 2 * COLUMNS; ++c)
                        to[c] = narrow<bfloat16>(sums[n][c] + (more == nullptr ? 0.0f : wide(more[c])));
                }
            }
        }
        if (shape != -1) _tile_release();
    }
};

}  // namespace

#else

extern "C" int has_tiles() { return 0; }

#endif
