// Linear layers of 4-bit weights and 8-bit activations (W4A8): y = x W^T + b, for the handful of rows of a decode step
// or a verification, where reading the weights is the work.
//
// 32 weights in a row of W are a group: w = scale (q - zero), with q of 4 bits, scale a bfloat16 and zero in sixteenths
// of a step. 32 activations are a group too, of 8 bits and one float32 scale. Inside a group products are summed as
// exact integers; groups are added in float32, in their order. So a row's result is the same bits alone and in any
// company, whichever of the paths below computes it, on every CPU with AVX2 (others round one sum more).
//
// Weights lie in tiles of 16 output channels, group after group: the order in which they are read. Sizes that are not
// multiples of 16 channels and 4 groups are padded with zeros.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__) && defined(__AVX512F__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr long CHANNELS = 16, GROUP = 32;
constexpr long AT_A_TIME = 4;  // groups: inputs are padded to so many
constexpr float ZERO_STEP = 1.0f / 16;
constexpr float ROUNDS = 0x1.8p23f;  // a float above this has no fraction: adding it rounds to the nearest integer

// One lane for each channel of a tile; compilers split what is wider than the registers of the CPU.
typedef float Floats __attribute__((vector_size(4 * CHANNELS)));
typedef int32_t Ints __attribute__((vector_size(4 * CHANNELS)));
typedef uint32_t Words __attribute__((vector_size(4 * CHANNELS)));
typedef uint8_t Bytes __attribute__((vector_size(4 * CHANNELS)));
typedef uint16_t Halves __attribute__((vector_size(2 * CHANNELS)));
typedef uint8_t Quarters __attribute__((vector_size(CHANNELS)));

struct Tile {  // 16 channels of a group: 4.75 bits a weight
    uint8_t levels[GROUP / 8][4 * CHANNELS];  // [j][4 c + i]: of channel c, 4 j + i in the low half and 16 further on in the high
    uint16_t scale[CHANNELS];
    uint8_t zero[CHANNELS];
};

template <class T> T load(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

uint16_t to_bfloat16(float value) {
    uint32_t bits = load<uint32_t>(&value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

float from_bfloat16(uint16_t value) {
    uint32_t bits = uint32_t(value) << 16;
    return load<float>(&bits);
}

Words widen(Halves halves) { return __builtin_convertvector(halves, Words); }

Floats scales(const Tile& tile) { return (Floats)(widen(load<Halves>(tile.scale)) << 16); }

Floats zeros(const Tile& tile) {  // in two steps, which compilers have instructions for
    return __builtin_convertvector((Ints)widen(__builtin_convertvector(load<Quarters>(tile.zero), Halves)), Floats);
}

// The 32 levels of each channel, four neighbours to a lane.
void unpack(const Tile& tile, Bytes levels[GROUP / 4]) {
    for (int j = 0; j < GROUP / 8; j++) {
        Words packed = load<Words>(tile.levels[j]);
        levels[j] = (Bytes)(packed & 0x0f0f0f0f);
        levels[j + GROUP / 8] = (Bytes)(packed >> 4 & 0x0f0f0f0f);
    }
}

// sum + four products a lane: unsigned levels of 4 bits by the same four signed activations.
Ints dot(Ints sum, Bytes levels, int32_t activations) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)levels, _mm512_set1_epi32(activations));
#elif defined(__AVX2__)
    __m256i x = _mm256_set1_epi32(activations);
    for (int half = 0; half < 2; half++) {
        __m256i s = load<__m256i>((char*)&sum + 32 * half), l = load<__m256i>((char*)&levels + 32 * half);
#if defined(__AVXVNNI__)
        s = _mm256_dpbusd_avx_epi32(s, l, x);
#else  // two products of at most 15 * 127 fit 16 bits
        s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(l, x), _mm256_set1_epi16(1)));
#endif
        std::memcpy((char*)&sum + 32 * half, &s, sizeof s);
    }
    return sum;
#else
    int8_t x[4];
    std::memcpy(x, &activations, sizeof x);
    for (int c = 0; c < CHANNELS; c++)
        for (int i = 0; i < 4; i++) sum[c] += levels[4 * c + i] * x[i];
    return sum;
#endif
}

#if defined(__AVX2__)
constexpr int UNROLLED = 8;
#else
constexpr int UNROLLED = 1;  // unrolled as well, what is above takes compilers a minute
#endif

long groups_of(long inputs) { return (inputs + AT_A_TIME * GROUP - 1) / (AT_A_TIME * GROUP) * AT_A_TIME; }

// What the activations of a layer are made from, on their way to 8 bits.
struct Input {
    const float* x;        // [rows, inputs], or [rows, 2 inputs] of gates and what they gate: silu(gate) times the other
    const float* norm;     // [inputs] weights of an RMSNorm over them; none: null
    float epsilon;         // of that norm
    bool gated;
};

float exponential(float x) {  // to 1e-7 of it; what compilers make vectors of
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float shifted = x * 0x1.715476p0f + ROUNDS, power = shifted - ROUNDS;
    const float rest = x - power * 0x1.62e4p-1f - power * 0x1.7f7d1cp-20f;  // ln 2 in two parts
    float value = 1.0f / 720;
    for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) value = value * rest + factor;
    const int32_t exponent = (load<int32_t>(&shifted) - load<int32_t>(&ROUNDS) + 127) << 23;
    return value * load<float>(&exponent);
}

// The sum of squares, in an order that depends on nothing but the length.
float squares(const float* x, long length) {
    float sums[CHANNELS] = {}, sum = 0;
    long i = 0;
    for (; i + CHANNELS <= length; i += CHANNELS)
        for (long lane = 0; lane < CHANNELS; lane++) sums[lane] += x[i + lane] * x[i + lane];
    for (; i < length; i++) sum += x[i] * x[i];
    for (float lane : sums) sum += lane;
    return sum;
}

// Row `row` of the activations [.., inputs].
void prepare(const Input& input, long row, long inputs, float* __restrict to) {
    const float* x = input.x + row * inputs * (input.gated ? 2 : 1);
    if (input.gated) {
        for (long i = 0; i < inputs; i++) to[i] = x[i] / (1 + exponential(-x[i])) * x[inputs + i];
    } else if (input.norm) {
        const float inverse = 1 / std::sqrt(squares(x, inputs) / inputs + input.epsilon);
        for (long i = 0; i < inputs; i++) to[i] = x[i] * inverse * input.norm[i];
    } else {
        std::memcpy(to, x, inputs * sizeof *x);
    }
}

// Activations in groups: w·x = scale (w_scale) (q·x - zero Σx).
struct Rows {
    const long groups;
    std::vector<int8_t> levels;     // [rows, groups * 32]
    std::vector<float> scale, sum;  // [rows, groups]; the sum times ZERO_STEP

    Rows(const Input& input, long rows, long inputs)
        : groups(groups_of(inputs)), levels(rows * groups * GROUP), scale(rows * groups), sum(rows * groups) {
        std::vector<float> prepared(groups * GROUP);
        for (long row = 0; row < rows; row++) {
            prepare(input, row, inputs, prepared.data());
            for (long group = 0; group < groups; group++) quantise(&prepared[group * GROUP], row * groups + group);
        }
    }

    void quantise(const float* x, long at) {
        // As integers, the largest absolute value is a NaN where there is one: it gets into the scale, and is not lost.
        int32_t bits[GROUP], found[GROUP], largest = 0, sum_of_levels = 0;
        std::memcpy(bits, x, sizeof bits);
        for (int i = 0; i < GROUP; i++) largest = std::max(largest, bits[i] & 0x7fffffff);
        const float most = load<float>(&largest), inverse = most > 0 ? 127 / most : 0;
        float shifted[GROUP];
        for (int i = 0; i < GROUP; i++) shifted[i] = x[i] * inverse + ROUNDS;
        std::memcpy(found, shifted, sizeof found);
        for (int i = 0; i < GROUP; i++) found[i] -= load<int32_t>(&ROUNDS), sum_of_levels += found[i];
        int8_t* to = &levels[at * GROUP];
        for (int i = 0; i < GROUP; i++) to[i] = found[i];
        scale[at] = most / 127;
        sum[at] = sum_of_levels * ZERO_STEP;
    }
};

// The tile that will be wanted a while after this one.
void prefetch(const Tile* tile) {
    constexpr int AHEAD = 24;
    for (size_t line = 0; line < sizeof *tile; line += 64) __builtin_prefetch((const char*)(tile + AHEAD) + line);
}

// sum += scale (products - zero). The difference is exact; whether product and sum are rounded together is the compiler's
// choice, for all paths here: together where the CPU can, as every one with AVX2.
void add_scaled(Floats& sum, Ints products, Floats scale, Floats zero) {
    sum += (__builtin_convertvector(products, Floats) - zero) * scale;
}

// y [.., outputs] of R rows and one tile of channels.
template <int R>
void multiply(const Tile* tile, const Rows& x, long row, const float* bias, Floats* y) {
    Floats results[R];
    for (int r = 0; r < R; r++) results[r] = load<Floats>(bias);
    const int8_t* levels = &x.levels[row * x.groups * GROUP];
    const float *x_scale = &x.scale[row * x.groups], *x_sum = &x.sum[row * x.groups];
    for (long group = 0; group < x.groups; group++, tile++) {
        prefetch(tile);
        Bytes weights[GROUP / 4];
        unpack(*tile, weights);
        Floats scale = scales(*tile), zero = zeros(*tile);
#pragma GCC unroll UNROLLED
        for (int r = 0; r < R; r++) {
            Ints products = {};
#pragma GCC unroll UNROLLED
            for (int j = 0; j < GROUP / 4; j++)
                products = dot(products, weights[j], load<int32_t>(levels + (r * x.groups + group) * GROUP + 4 * j));
            long at = r * x.groups + group;
            add_scaled(results[r], products, scale * x_scale[at], zero * x_sum[at]);
        }
    }
    for (int r = 0; r < R; r++) y[r] = results[r];
}

constexpr long FEW_ROWS = 8;  // whose sums fit the registers beside a group of weights

void multiply_few(const Tile* tile, const Rows& x, long row, long rows, const float* bias, Floats* y) {
    constexpr decltype(&multiply<1>) BY_ROWS[] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>,
                                                  multiply<5>, multiply<6>, multiply<7>, multiply<8>};
    BY_ROWS[rows - 1](tile, x, row, bias, y);
}

#if defined(__AMX_INT8__) && defined(__AVX512F__)
// For more rows: AMX multiplies 16 at a time, and what is left is to scale and add the groups' sums.
constexpr long AMX_ROWS = 16, FEWEST_FOR_AMX = 7;

bool amx_is_permitted() {  // Linux gives a process the registers when it asks
    static const bool permitted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
    return permitted;
}

struct AmxShapes {  // registers 0-3: sums [rows, 16]; 4, 5: activations [rows, 32]; 6, 7: weights [32, 16]
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, GROUP, GROUP, 64, 64};
        uint8_t rows[16] = {};
    } shapes;

    explicit AmxShapes(long rows) {
        for (int i = 0; i < 8; i++) shapes.rows[i] = i < 6 ? rows : GROUP / 4;
        if (rows) _tile_loadconfig(&shapes);
    }
    ~AmxShapes() {
        if (shapes.rows[0]) _tile_release();
    }
};

void multiply_amx(const Tile* tile, const Rows& x, long row, long rows, const float* bias, Floats* y) {
    Bytes weights[2][AT_A_TIME][GROUP / 4];
    Ints products[2][AT_A_TIME][AMX_ROWS];
    for (long r = 0; r < rows; r++) y[r] = load<Floats>(bias);
    const auto add = [&](long group) {
        const Ints(*sums)[AMX_ROWS] = products[group / AT_A_TIME % 2];
        Floats scale[AT_A_TIME], zero[AT_A_TIME];
        for (int i = 0; i < AT_A_TIME; i++) scale[i] = scales(tile[group + i]), zero[i] = zeros(tile[group + i]);
        for (long r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int i = 0; i < AT_A_TIME; i++) {
                long at = (row + r) * x.groups + group + i;
                add_scaled(y[r], sums[i][r], scale[i] * x.scale[at], zero[i] * x.sum[at]);
            }
    };
    const int8_t* levels = &x.levels[row * x.groups * GROUP];
    const long stride = x.groups * GROUP;
    for (int i = 0; i < AT_A_TIME; i++) unpack(tile[i], weights[0][i]);
    for (long group = 0; group < x.groups; group += AT_A_TIME) {
        Bytes(*now)[GROUP / 4] = weights[group / AT_A_TIME % 2];
#define GROUP_SUMS(i, a, w)                                        \
    _tile_zero(i);                                                 \
    _tile_loadd(a, levels + (group + i) * GROUP, stride);          \
    _tile_loadd(w, now[i], 64);                                    \
    _tile_dpbsud(i, a, w);
        GROUP_SUMS(0, 4, 6)
        GROUP_SUMS(1, 5, 7)
        GROUP_SUMS(2, 4, 6)
        GROUP_SUMS(3, 5, 7)
#undef GROUP_SUMS
        // While those are computed, and what was before is on its way to memory and back:
        if (group + AT_A_TIME < x.groups) {
            Bytes(*next)[GROUP / 4] = weights[(group / AT_A_TIME + 1) % 2];
            for (int i = 0; i < AT_A_TIME; i++) {
                const Tile* ahead = tile + group + AT_A_TIME + i;
                prefetch(ahead);
                unpack(*ahead, next[i]);
            }
        }
        if (group) add(group - AT_A_TIME);
        Ints(*to)[AMX_ROWS] = products[group / AT_A_TIME % 2];
        _tile_stored(0, to[0], 64);
        _tile_stored(1, to[1], 64);
        _tile_stored(2, to[2], 64);
        _tile_stored(3, to[3], 64);
    }
    add(x.groups - AT_A_TIME);
}
#else
constexpr long AMX_ROWS = FEW_ROWS, FEWEST_FOR_AMX = 0;
bool amx_is_permitted() { return false; }
struct AmxShapes {
    explicit AmxShapes(long) {}
};
constexpr auto multiply_amx = multiply_few;
#endif

template <class Combine> float across(Floats values, Combine combine) {
    float lanes[CHANNELS];
    std::memcpy(lanes, &values, sizeof lanes);
    for (int half = CHANNELS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = combine(lanes[i], lanes[i + half]);
    return lanes[0];
}

float total(Floats values) {
    return across(values, [](float a, float b) { return a + b; });
}

Floats rounded_within(Floats values, float least, float most) {
    values = (values + ROUNDS) - ROUNDS;
    values = values < least ? Floats{} + least : values;
    return values > most ? Floats{} + most : values;
}

constexpr float FOUND = GROUP * 1e-3f;  // squared steps: what a rounding of 4-bit weights to bfloat16 leaves behind

// The levels of a group of 32 weights with the least squared error, among ranges that are divided into more or fewer
// steps: fewer find weights that have been quantised before where they were, more cut off what lies far out. Returns
// whether there are any: there are none for weights that are not finite, or whose squares are not.
bool quantise(const float w[GROUP], uint8_t levels[GROUP], uint16_t& scale, uint8_t& zero) {
    const Floats first = load<Floats>(w), second = load<Floats>(w + CHANNELS), none = {};
    Floats lows = first < second ? first : second, highs = first < second ? second : first;
    const float low = across(lows < none ? lows : none, [](float a, float b) { return a < b ? a : b; });
    const float high = across(highs > none ? highs : none, [](float a, float b) { return a > b ? a : b; });
    float least = std::numeric_limits<float>::infinity();
    for (int steps : {15, 14, 13, 12, 11, 10, 9, 8, 7, 16, 17, 18}) {
        const uint16_t rounded = to_bfloat16((high - low) / steps);
        const float step = from_bfloat16(rounded), inverse = step > 0 ? 1 / step : 0;
        const float cut = std::max(0, steps - 15) / 2.0f;
        const float sixteenths = std::min(255.0f, std::max(0.0f, std::nearbyint((-low * inverse - cut) / ZERO_STEP)));
        const float offset = sixteenths * ZERO_STEP;
        const Floats a = rounded_within(first * inverse + offset, 0, 15), b = rounded_within(second * inverse + offset, 0, 15);
        const Floats off_a = step * (a - offset) - first, off_b = step * (b - offset) - second;
        const float error = total(off_a * off_a + off_b * off_b);
        if (error < least) {
            least = error, scale = rounded, zero = sixteenths;
            for (int i = 0; i < CHANNELS; i++) levels[i] = a[i], levels[CHANNELS + i] = b[i];
        }
        if (error <= FOUND * step * step) break;
    }
    return least < std::numeric_limits<float>::infinity();
}

// Fetching ahead ends at a page: a core reads a quarter more from large ones. To be asked before memory is first used.
void ask_for_huge_pages(uint8_t* from, long bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    const uintptr_t first = ((uintptr_t)from + PAGE - 1) / PAGE * PAGE, last = ((uintptr_t)from + bytes) / PAGE * PAGE;
    if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);  // no matter if it is refused
#endif
}

}  // namespace

extern "C" {

// Bytes of the tiles of a weight [outputs, inputs].
long int4_bytes(long outputs, long inputs) {
    return (outputs + CHANNELS - 1) / CHANNELS * groups_of(inputs) * sizeof(Tile);
}

// weight [outputs, inputs] in bfloat16 -> tiles. Returns whether all weights are finite numbers, below 1e18.
int int4_pack(const uint16_t* weight, long outputs, long inputs, uint8_t* to) {
    const long groups = groups_of(inputs), tiles = (outputs + CHANNELS - 1) / CHANNELS;
    int finite = 1;
    ask_for_huge_pages(to, int4_bytes(outputs, inputs));
    std::memset(to, 0, int4_bytes(outputs, inputs));
#pragma omp parallel for reduction(&& : finite)
    for (long t = 0; t < tiles; t++)
        for (long group = 0; group * GROUP < inputs; group++) {
            Tile& tile = ((Tile*)to)[t * groups + group];
            for (long c = 0; c < std::min(CHANNELS, outputs - t * CHANNELS); c++) {
                float w[GROUP] = {};
                uint8_t levels[GROUP] = {};
                const uint16_t* from = weight + (t * CHANNELS + c) * inputs + group * GROUP;
                for (long i = 0; i < std::min(GROUP, inputs - group * GROUP); i++) w[i] = from_bfloat16(from[i]);
                finite = quantise(w, levels, tile.scale[c], tile.zero[c]) && finite;
                for (int i = 0; i < GROUP / 2; i++)
                    tile.levels[i / 4][4 * c + i % 4] = levels[i] | levels[i + GROUP / 2] << 4;
            }
        }
    return finite;
}

// What the tiles stand for: weight [outputs, inputs].
void int4_unpack(const uint8_t* from, long outputs, long inputs, float* weight) {
    long groups = groups_of(inputs);
    for (long n = 0; n < outputs; n++)
        for (long k = 0; k < inputs; k++) {
            const Tile& tile = ((const Tile*)from)[n / CHANNELS * groups + k / GROUP];
            long c = n % CHANNELS, i = k % (GROUP / 2);
            int level = tile.levels[i / 4][4 * c + i % 4] >> (k % GROUP < GROUP / 2 ? 0 : 4) & 15;
            weight[n * inputs + k] = from_bfloat16(tile.scale[c]) * (level - tile.zero[c] * ZERO_STEP);
        }
}

// y [rows, outputs] = x W^T + bias, which has outputs padded to whole tiles; `add`: is added to what is in y.
void int4_linear(const uint8_t* weight, const float* bias, const float* x, const float* norm, float epsilon, int gated,
                 float* y, int add, long rows, long outputs, long inputs) {
    const Rows activations({x, norm, epsilon, gated != 0}, rows, inputs);
    const Tile* tiles = (const Tile*)weight;
    const bool amx = rows >= FEWEST_FOR_AMX && amx_is_permitted();
    const long at_once = amx ? AMX_ROWS : FEW_ROWS;
#pragma omp parallel
    for (long row = 0; row < rows; row += at_once) {
        const long part = std::min(at_once, rows - row);
        const AmxShapes shapes(amx ? part : 0);
#pragma omp for schedule(static)
        for (long channel = 0; channel < outputs; channel += CHANNELS) {
            const Tile* tile = tiles + channel / CHANNELS * activations.groups;
            Floats sums[AMX_ROWS];
            (amx ? multiply_amx : multiply_few)(tile, activations, row, part, bias + channel, sums);
            const long channels = std::min(CHANNELS, outputs - channel);
            for (long r = 0; r < part; r++) {
                float* to = y + (row + r) * outputs + channel;
                for (long c = 0; c < channels; c++) to[c] = add ? to[c] + sums[r][c] : sums[r][c];
            }
        }
    }
}
}
