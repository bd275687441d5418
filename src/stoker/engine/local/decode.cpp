// One decoding step on a CPU: norms, attention to the cache, the MLP's gate; with the products of dots.h or tiles.h,
// all of it in one call.
//
// Called through a C interface (compiled_math.py; structures: structures.py), for float32 and bfloat16; every sum and
// exponential is float32, and a result is rounded once. A task computes the same numbers whichever thread has it, so
// threads change no bit.
//
// B rows, K key-value heads, G query heads of each, D head dimension.

#include "attention.h"
#include "dots.h"
#include "numbers.h"
#include "tiles.h"

namespace {

// x += after(y), or y where there is no `after`, or nothing without y; out = norm(x). For all threads of a team.
template <class T>
void add_norm(T* x, const T* y, const Norm& after, const Norm& norm, T* out, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        T* at = x + row * width;
        if (y != nullptr) {
            const T* more = y + row * width;
            if (after.weight == nullptr) {
#pragma omp simd
                for (int64_t i = 0; i < width; ++i) at[i] = narrow<T>(wide(at[i]) + wide(more[i]));
            } else {
                const float scale = 1.0f / std::sqrt(mean_square(more, width) + after.eps);
#pragma omp simd
                for (int64_t i = 0; i < width; ++i)
                    at[i] = narrow<T>(wide(at[i]) + wide(narrow<T>(wide(more[i]) * scale * after.weight[i])));
            }
        }
        const float scale = 1.0f / std::sqrt(mean_square(at, width) + norm.eps);
        T* to = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) to[i] = narrow<T>(wide(at[i]) * scale * norm.weight[i]);
    }
}

// out = f(gate) * up, f the SiLU or the GELU by tanh. For all threads of a team.
template <class T>
void gated(const T* gate, int64_t gate_stride, const T* up, int64_t up_stride, int gelu, T* out, int64_t rows,
           int64_t width) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T* a = gate + row * gate_stride;
        const T* b = up + row * up_stride;
        T* to = out + row * width;
        if (gelu) {
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) {
                const float x = wide(a[i]);
                to[i] = narrow<T>(x * sigmoid(gelu_argument(x)) * wide(b[i]));
            }
        } else {
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) to[i] = narrow<T>(wide(a[i]) * sigmoid(wide(a[i])) * wide(b[i]));
        }
    }
}

// All that a layer computes with.
struct Layer {
    Attention attention;
    Matrix query, key, value, output, gate, up, down;
    Norm after_attention, before_mlp, after_mlp, following;
    int32_t gelu;
};

// Room for what a step computes, (rows, its width) each.
template <class T> struct Room {
    T *x, *normed, *query, *key, *value, *seen, *mixed, *gate, *up, *gated;
};

// Numbers that outlast a call, for `prepare`.
float* kept_room(int64_t numbers) {
    thread_local std::vector<float> room;
    if (static_cast<int64_t>(room.size()) < numbers) room.resize(numbers);
    return room.data();
}

// Maps of the same input, `count` of them.
template <class T, class Products>
void products(const T* x, int64_t stride, int64_t rows, int64_t count, const Matrix* maps, T* const* out, int threads) {
    float* room = kept_room(rows * maps->depth);
#pragma omp parallel num_threads(threads)
    {
        const auto input = Products::prepare(x, stride, rows, maps->depth, room);
        for (int64_t map = 0; map < count; ++map) Products::multiply(input, rows, maps[map], out[map]);
    }
}

// All layers for the newest token of each row: `x` (B, width) becomes the last sum, `normed` its norm, both in `room`.
template <class T, class Products>
void step(const Layer* layers, int64_t count, const Norm& first, const Rows& rows, const Room<T>& room, int64_t width) {
    const int64_t B = rows.rows;
    float* prepared = kept_room(B * std::max({width, layers->output.depth, layers->down.depth}));
    const auto prepare = [&](const T* x, const Matrix& w) {
        return Products::prepare(x, w.depth, B, w.depth, prepared);
    };
#pragma omp parallel num_threads(rows.threads)
    {
        add_norm<T>(room.x, nullptr, first, first, room.normed, B, width);
        for (const Layer* layer = layers; layer != layers + count; ++layer) {
            const Matrix &query = layer->query, &key = layer->key, &value = layer->value;
            const auto before_heads = prepare(room.normed, query);
            Products::multiply(before_heads, B, query, room.query);
            Products::multiply(before_heads, B, key, room.key);
            Products::multiply(before_heads, B, value, room.value);
#pragma omp barrier
            attend<T>(layer->attention, rows,
                      {room.query, room.key, room.value, query.outputs, key.outputs, value.outputs}, room.seen);
            Products::multiply(prepare(room.seen, layer->output), B, layer->output, room.mixed);
#pragma omp barrier
            add_norm<T>(room.x, room.mixed, layer->after_attention, layer->before_mlp, room.normed, B, width);
            const auto before_mlp = prepare(room.normed, layer->gate);
            Products::multiply(before_mlp, B, layer->gate, room.gate);
            Products::multiply(before_mlp, B, layer->up, room.up);
#pragma omp barrier
            gated<T>(room.gate, layer->gate.outputs, room.up, layer->up.outputs, layer->gelu, room.gated, B,
                     layer->down.depth);
            Products::multiply(prepare(room.gated, layer->down), B, layer->down, room.mixed);
#pragma omp barrier
            add_norm<T>(room.x, room.mixed, layer->after_mlp, layer->following, room.normed, B, width);
        }
    }
}

}  // namespace

#define STOKER_EXPORT(T, NAME)                                                                                         \
    void add_norm_##NAME(T* x, const T* y, const Norm* after, const Norm* norm, T* out, int64_t rows, int64_t width,   \
                         int threads) {                                                                                \
        _Pragma("omp parallel num_threads(threads) if (rows * width >= MANY)")                                         \
        add_norm<T>(x, y, *after, *norm, out, rows, width);                                                            \
    }                                                                                                                  \
    void gated_##NAME(const T* gate, int64_t gate_stride, const T* up, int64_t up_stride, int gelu, T* out,            \
                      int64_t rows, int64_t width, int threads) {                                                      \
        _Pragma("omp parallel num_threads(threads) if (rows * width >= MANY)")                                         \
        gated<T>(gate, gate_stride, up, up_stride, gelu, out, rows, width);                                            \
    }                                                                                                                  \
    void attend_##NAME(const Attention* a, const Rows* r, const T* query, int64_t query_stride, const T* key,          \
                       int64_t key_stride, const T* value, int64_t value_stride, T* seen) {                            \
        _Pragma("omp parallel num_threads(r->threads) if (r->rows * r->heads * r->group * r->dim >= MANY)")            \
        attend<T>(*a, *r, {query, key, value, query_stride, key_stride, value_stride}, seen);                          \
    }

#define STOKER_EXPORT_PRODUCTS(T, NAME, PRODUCTS)                                                                      \
    void products_##NAME(const T* x, int64_t stride, int64_t rows, int64_t count, const Matrix* maps, T* const* out,   \
                         int threads) {                                                                                \
        products<T, PRODUCTS>(x, stride, rows, count, maps, out, threads);                                             \
    }                                                                                                                  \
    void step_##NAME(const Layer* layers, int64_t count, const Norm* first, const Rows* rows, const Room<T>* room,     \
                     int64_t width) {                                                                                  \
        step<T, PRODUCTS>(layers, count, *first, *rows, *room, width);                                                 \
    }

extern "C" {
STOKER_EXPORT(float, float32)
STOKER_EXPORT(bfloat16, bfloat16)
#ifdef STOKER_DOTS
STOKER_EXPORT_PRODUCTS(float, rows_float32, Dots<float>)
STOKER_EXPORT_PRODUCTS(bfloat16, rows_bfloat16, Dots<bfloat16>)
#endif
#ifdef STOKER_TILES
STOKER_EXPORT_PRODUCTS(bfloat16, tiles, Tiles)
#endif
}
