// Attention of flat query rows over a paged KV pool, causal or under a fan-out, in float32 on the CPU.
//
// The mask is the predicate of `fan_out_mask.py`, read from the small integer tensors of `rows.py`. A query is one head
// of one row. Up to QUERIES of a sequence on one KV head form a tile, and the tiles of a sequence go through its
// columns together, so that a key or a value is read once for all of them. Scores have a query in each lane of a
// vector, sums an element of the head: neither needs a transposed pool.
//
// Columns are attended COLUMNS at a time, from column 0 on, with the softmax kept up to date as in FlashAttention; the
// few columns of a row's own path come last. So what is added to what, in which order, follows from the row and its
// columns alone: its result is the same bits whatever else is in the batch, and on any number of threads.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>

#include <omp.h>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef std::int32_t Integers __attribute__((vector_size(4 * LANES)));

constexpr int QUERIES = 64;            // of a tile, a multiple of LANES
constexpr int COLUMNS = 64;            // attended at a time
constexpr int STEP = 8;                // columns whose scores are computed at once: divides COLUMNS
constexpr int WIDEST = REGISTERS / 8;  // vectors side by side in one block of a product
constexpr int TILES = 8;               // that go through the columns together: what fits the second cache
constexpr int LINE = 16;               // floats that memory brings at once
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

template <class T>
inline T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
inline void store(void* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

// 2^x to 2e-7 for x <= 0, and below -126 as there. The polynomial is that of Cephes' exp2f. NaN stays NaN.
inline Vector power_of_2(Vector x) {
    x = x < -126.0f ? Vector{} - 126.0f : x;
    const Vector shifted = x + 12582912.0f;  // 1.5 * 2^23: leaves the nearest integer in the low bits
    const Vector f = x - (shifted - 12582912.0f);
    Vector p = f * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    return (Vector)((Integers)p + ((Integers)shifted << 23));
}

// The next columns, up to COLUMNS of them, for all KV heads; behind them those that will be wanted then.
struct Columns {
    int count;
    const float* keys[2 * COLUMNS];
    const float* values[2 * COLUMNS];
};

// Scores of B columns, from `c` on, for W vectors of queries, at the elements of a head that starts at `head`.
// Meanwhile the columns that are wanted then are fetched, a line or two at a time: many at once wait for each other,
// and the sums for them.
template <int W, int B>
inline void multiply_keys(const float* queries, const Columns& columns, int c, int head, int dim, float* scores) {
    Vector sums[B][W] = {};
    const int half = dim / 2;
    for (int part = 0; part < 2; ++part) {
        const float* const* keys = columns.keys + c;
        const float* const* wanted = (part ? columns.values : columns.keys) + COLUMNS + c;
        for (int d = part * half; d < (part ? dim : half); ++d) {
            const int at = d - part * half;
            for (int i = 0; i < STEP / B; ++i)
                __builtin_prefetch(wanted[(at * (STEP / B) + i) % B] + head + at / STEP * LINE, 0, 2);
            Vector q[W];
            for (int w = 0; w < W; ++w) q[w] = load<Vector>(queries + d * QUERIES + w * LANES);
            for (int b = 0; b < B; ++b) {
                const float k = keys[b][head + d];
                for (int w = 0; w < W; ++w) sums[b][w] += q[w] * k;
            }
        }
    }
    for (int b = 0; b < B; ++b)
        for (int w = 0; w < W; ++w) store(scores + b * QUERIES + w * LANES, sums[b][w]);
}

template <int W>
void multiply_keys(const float* queries, const Columns& columns, int head, int dim, float* scores) {
    constexpr int B = W * STEP <= REGISTERS / 2 ? STEP : STEP / 2;
    for (int c = 0; c < columns.count; c += B)
        multiply_keys<W, B>(queries, columns, c, head, dim, scores + c * QUERIES);
}

// The sums of M queries at W vectors of elements from d on: faded, and the weighted values of the columns added.
template <class V, int M, int W>
inline void add_values(const float* weights, const Columns& columns, int head, int dim, int d, const float* fades,
                       float* sums) {
    constexpr int WIDTH = sizeof(V) / sizeof(float);
    V sum[M][W];
    for (int m = 0; m < M; ++m)
        for (int w = 0; w < W; ++w) sum[m][w] = load<V>(sums + m * dim + d + w * WIDTH) * fades[m];
    for (int c = 0; c < columns.count; ++c) {
        V v[W];
        for (int w = 0; w < W; ++w) v[w] = load<V>(columns.values[c] + head + d + w * WIDTH);
        for (int m = 0; m < M; ++m) {
            const float p = weights[c * QUERIES + m];
            for (int w = 0; w < W; ++w) sum[m][w] += v[w] * p;
        }
    }
    for (int m = 0; m < M; ++m)
        for (int w = 0; w < W; ++w) store(sums + m * dim + d + w * WIDTH, sum[m][w]);
}

template <int M>
void add_values(const float* weights, const Columns& columns, int head, int dim, const float* fades, float* sums) {
    int d = 0;
    for (; d + WIDEST * LANES <= dim; d += WIDEST * LANES)
        add_values<Vector, M, WIDEST>(weights, columns, head, dim, d, fades, sums);
    for (; d + LANES <= dim; d += LANES) add_values<Vector, M, 1>(weights, columns, head, dim, d, fades, sums);
    for (; d < dim; ++d) add_values<float, M, 1>(weights, columns, head, dim, d, fades, sums);
}

// Queries of one KV head and what has been computed for them, over several rows of the sequence.
struct Tile {
    int dim;
    std::unique_ptr<float[]> memory;
    float* queries;  // [dim, QUERIES], scaled, for exponentials to base 2
    float* sums;     // [QUERIES, dim] of weighted values
    alignas(64) float best[QUERIES];            // the highest score
    alignas(64) float total[QUERIES];           // of the weights, 2^(score - best)
    alignas(64) std::int32_t contexts[QUERIES];  // shared columns that a query sees
    int kv_head, first, count, shared;  // number of the first query in the KV head; how many; the largest context

    explicit Tile(int dim) : dim(dim), memory(new float[2 * QUERIES * dim + LINE]) {
        void* start = memory.get();
        std::size_t space = (2 * QUERIES * dim + LINE) * sizeof(float);
        queries = static_cast<float*>(std::align(LINE * sizeof(float), 2 * QUERIES * dim, start, space));
        sums = queries + QUERIES * dim;
    }

    // Attend the queries from `from` to `to` to the columns. Query q sees the first limits[q] of them; there are limits
    // for whoever shares a vector with these queries.
    void attend(Columns& columns, int from, int to, const std::int32_t* limits) {
        alignas(64) float scores[COLUMNS * QUERIES], fades[QUERIES];
        const int start = from / LANES * LANES, head = kv_head * dim;
        for (int q = start; q < to; q += WIDEST * LANES) {
            switch (std::min(WIDEST, (to - q + LANES - 1) / LANES)) {
                case 1: multiply_keys<1>(queries + q, columns, head, dim, scores + q); break;
                case 2: multiply_keys<2>(queries + q, columns, head, dim, scores + q); break;
                case 3: multiply_keys<3>(queries + q, columns, head, dim, scores + q); break;
                default: multiply_keys<WIDEST>(queries + q, columns, head, dim, scores + q);
            }
        }
        for (int q = start; q < to; q += LANES) weigh(scores + q, columns.count, limits, fades + q, q);
        for (int q = from; q < to; q += 4) {
            switch (std::min(4, to - q)) {
                case 1: add_values<1>(scores + q, columns, head, dim, fades + q, sums + q * dim); break;
                case 2: add_values<2>(scores + q, columns, head, dim, fades + q, sums + q * dim); break;
                case 3: add_values<3>(scores + q, columns, head, dim, fades + q, sums + q * dim); break;
                default: add_values<4>(scores + q, columns, head, dim, fades + q, sums + q * dim);
            }
        }
    }

    // Turn the scores of the vector of queries from q on into weights. Older weights are then `fades` times as much.
    void weigh(float* scores, int columns, const std::int32_t* limits, float* fades, int q) {
        const Integers limit = load<Integers>(limits + q);
        const Vector nothing = Vector{} + NOTHING, before = load<Vector>(best + q);
        Vector top = before, sum{};
        for (int c = 0; c < columns; ++c) {
            const Vector score = c < limit ? load<Vector>(scores + c * QUERIES) : nothing;
            top = score > top ? score : top;
        }
        for (int c = 0; c < columns; ++c) {
            const Vector weight = power_of_2(load<Vector>(scores + c * QUERIES) - top);
            const Vector seen = c < limit ? weight : Vector{};
            sum += seen;
            store(scores + c * QUERIES, seen);
        }
        const Vector fade = power_of_2(before - top);
        store(best + q, top);
        store(fades, fade);
        store(total + q, load<Vector>(total + q) * fade + sum);
    }
};

struct Attention {
    const float *query, *key_pool, *value_pool;
    const std::int32_t *block_table, *sequences, *fork, *branch;
    float* output;
    std::int64_t query_stride, table_width;
    std::int32_t block_size, kv_heads, group, dim;
    float scale;

    struct Sequence {
        std::int32_t prefix, trunk, branches, steps, first_row, rows;
    };

    Sequence sequence(int s) const { return load<Sequence>(sequences + s * 6); }

    int tiles(const Sequence& of) const { return (of.rows * group + QUERIES - 1) / QUERIES * kv_heads; }

    // Attend the tiles from `first` to `last` of sequence s, which are numbered row by row, then head by head.
    void attend(std::deque<Tile>& tiles, int s, int first, int last) const {
        const Sequence of = sequence(s);
        const std::int32_t* table = block_table + s * table_width;
        int shared = 0;
        for (int t = first; t < last; ++t) {
            start(tiles[t - first], of, t);
            shared = std::max(shared, tiles[t - first].shared);
        }
        Columns columns;
        std::int32_t limits[QUERIES] = {};
        find(columns, 0, std::min(COLUMNS, shared), table);
        for (int column = 0; column < shared; column += COLUMNS) {
            columns.count = std::min(COLUMNS, shared - column);
            std::copy_n(columns.keys + COLUMNS, COLUMNS, columns.keys);
            std::copy_n(columns.values + COLUMNS, COLUMNS, columns.values);
            const int left = shared - column - COLUMNS;
            if (left > 0) find(columns, column + COLUMNS, std::min(COLUMNS, left), table);
            for (int t = 0; t < last - first; ++t) {
                if (column >= tiles[t].shared) continue;
                for (int q = 0; q < QUERIES; ++q) limits[q] = tiles[t].contexts[q] - column;
                tiles[t].attend(columns, 0, tiles[t].count, limits);
            }
        }
        for (int t = 0; t < last - first; ++t) {
            if (of.steps) attend_own(tiles[t], columns, of, table);
            finish(tiles[t], of);
        }
    }

    // The output or, with its own stride, the query of the tile's query q.
    std::int64_t place(const Tile& tile, const Sequence& of, int q, std::int64_t stride) const {
        const int number = tile.first + q;
        return (of.first_row + number / group) * stride + (tile.kv_head * group + number % group) * dim;
    }

    void start(Tile& tile, const Sequence& of, int number) const {
        tile.kv_head = number % kv_heads;
        tile.first = number / kv_heads * QUERIES;
        tile.count = std::min(QUERIES, of.rows * group - tile.first);
        for (int q = 0; q < tile.count; ++q) {
            tile.contexts[q] = of.prefix + fork[of.first_row + (tile.first + q) / group] + 1;
            const float* from = query + place(tile, of, q, query_stride);
            for (int d = 0; d < dim; ++d) tile.queries[d * QUERIES + q] = from[d] * (scale * LOG2_E);
        }
        for (int q = tile.count; q % LANES; ++q) {  // lanes without a query
            tile.contexts[q] = 1;
            for (int d = 0; d < dim; ++d) tile.queries[d * QUERIES + q] = 0.0f;
        }
        tile.shared = *std::max_element(tile.contexts, tile.contexts + tile.count);
        std::fill_n(tile.sums, tile.count * dim, 0.0f);
        std::fill_n(tile.total, QUERIES, 0.0f);
        std::fill_n(tile.best, QUERIES, NOTHING);
    }

    // Put `count` columns behind the next ones.
    void find(Columns& columns, int column, int count, const std::int32_t* table) const {
        const std::int64_t token = std::int64_t(kv_heads) * dim;
        int block = column / block_size, offset = column % block_size;
        for (int c = COLUMNS; c < COLUMNS + count; ++block, offset = 0) {
            std::int64_t from = (std::int64_t(table[block]) * block_size + offset) * token;
            for (const int end = std::min(COLUMNS + count, c + block_size - offset); c < end; ++c, from += token) {
                columns.keys[c] = key_pool + from;
                columns.values[c] = value_pool + from;
            }
        }
        // Products are of STEP columns.
        for (int c = COLUMNS + count; c < 2 * COLUMNS; ++c) {
            columns.keys[c] = columns.keys[COLUMNS];
            columns.values[c] = columns.values[COLUMNS];
        }
    }

    // Attend each row's own path.
    void attend_own(Tile& tile, Columns& columns, const Sequence& of, const std::int32_t* table) const {
        const std::int64_t token = std::int64_t(kv_heads) * dim;
        for (int from = 0, to; from < tile.count; from = to) {
            const int row = (tile.first + from) / group;
            to = std::min(tile.count, (row + 1) * group - tile.first);
            std::int32_t limits[QUERIES];
            for (int step = 0; step < of.steps; step += COLUMNS) {
                columns.count = std::min(COLUMNS, of.steps - step);
                for (int c = 0; c < COLUMNS; ++c) {
                    const int own = (step + std::min(c, columns.count - 1)) * of.branches + branch[of.first_row + row];
                    const int column = of.prefix + of.trunk + own;
                    const std::int64_t slot =
                        std::int64_t(table[column / block_size]) * block_size + column % block_size;
                    columns.keys[c] = key_pool + slot * token;
                    columns.values[c] = value_pool + slot * token;
                }
                for (int q = 0; q < QUERIES; ++q) limits[q] = from <= q && q < to ? columns.count : 0;
                tile.attend(columns, from, to, limits);
            }
        }
    }

    void finish(const Tile& tile, const Sequence& of) const {
        for (int q = 0; q < tile.count; ++q) {
            float* to = output + place(tile, of, q, std::int64_t(kv_heads) * group * dim);
            const float share = 1.0f / tile.total[q];
            for (int d = 0; d < dim; ++d) to[d] = tile.sums[q * dim + d] * share;
        }
    }
};

}  // namespace

// Shapes and meaning as in `triton_lang.py: fan_out_attention_kernel`; all contiguous, but for the rows of `query`,
// which lie `query_stride` elements apart. There are `group` query heads on each KV head. Nothing is checked.
extern "C" void fan_out_attention(const float* query, const float* key_pool, const float* value_pool,
                                  const std::int32_t* block_table, const std::int32_t* sequences,
                                  const std::int32_t* fork, const std::int32_t* branch, float* output,
                                  std::int64_t query_stride, std::int64_t table_width, std::int32_t num_sequences,
                                  std::int32_t block_size, std::int32_t kv_heads, std::int32_t group, std::int32_t dim,
                                  float scale) {
    const Attention attention{query,        key_pool,    value_pool, block_table, sequences, fork, branch, output,
                              query_stride, table_width, block_size, kv_heads,    group,     dim,  scale};
    int all = 0, most = 0;
    for (int s = 0; s < num_sequences; ++s) {
        const int tiles = attention.tiles(attention.sequence(s));
        all += tiles;
        most = std::max(most, tiles);
    }
    // Together as many as leave work for all threads.
    const int together = std::clamp(all / omp_get_max_threads(), 1, TILES);
    const std::int64_t parts = (most + together - 1) / together;
#pragma omp parallel if (all > together)
    {
        std::deque<Tile> tiles;
        for (int t = 0; t < std::min(most, together); ++t) tiles.emplace_back(dim);
#pragma omp for schedule(dynamic)
        for (std::int64_t part = 0; part < parts * num_sequences; ++part) {
            const int s = part / parts, first = part % parts * together;
            const int last = std::min(first + together, attention.tiles(attention.sequence(s)));
            if (first < last) attention.attend(tiles, s, first, last);
        }
    }
}

// What comes before the attention: of each row of `projected` [N, (heads + 2 * kv_heads) * dim], rotate the queries
// into `query` [N, heads, dim] and the keys into their slot of the pool, and copy the values there. Elements half a head
// apart are a pair, which row n turns by the angle whose cosine and sine are cosines[n] and sines[n] [N, dim]. Of these
// only the second halves are read: they hold what the first do, but for a sign that some turn there.
// Returns the first row whose slot is not one of the pool's `num_slots`, before anything is written, or -1.
extern "C" std::int64_t rotate_and_store(const float* projected, const float* cosines, const float* sines,
                                         const std::int64_t* slots, float* query, float* key_pool, float* value_pool,
                                         std::int64_t rows, std::int64_t num_slots, std::int32_t heads,
                                         std::int32_t kv_heads, std::int32_t dim) {
    for (std::int64_t row = 0; row < rows; ++row)
        if (slots[row] < 0 || slots[row] >= num_slots) return row;
    const int half = dim / 2;
    const std::int64_t token = std::int64_t(kv_heads) * dim;
#pragma omp parallel for if (rows > QUERIES)
    for (std::int64_t row = 0; row < rows; ++row) {
        const float* from = projected + row * (heads + 2 * kv_heads) * dim;
        const float *cosine = cosines + row * dim + half, *sine = sines + row * dim + half;
        for (int head = 0; head < heads + kv_heads; ++head, from += dim) {
            float* __restrict__ to = head < heads ? query + (row * heads + head) * dim
                                                  : key_pool + slots[row] * token + (head - heads) * dim;
            for (int d = 0; d < half; ++d) {
                to[d] = from[d] * cosine[d] - from[d + half] * sine[d];
                to[d + half] = from[d + half] * cosine[d] + from[d] * sine[d];
            }
        }
        std::copy_n(from, token, value_pool + slots[row] * token);
    }
    return -1;
}
