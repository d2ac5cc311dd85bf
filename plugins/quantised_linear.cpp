// Linear layers of 4-bit or 8-bit weights and 8-bit activations (W4A8, W8A8): y = x W^T + b, for the handful of rows of
// a decode step or a verification, where reading the weights is the work.
//
// 32 weights in a row of W are a group: w = scale (q - zero), with q of 4 or 8 bits and scale a bfloat16. The zero of 4
// bits is in sixteenths of a step; of 8 bits it is 128, in the middle of 1..255. 32 activations are a group too, of 8 bits
// and one float32 scale. Inside a group products are summed as exact integers; groups are added in float32, in their
// order. So a row's result is the same bits alone and in any company, whichever of the paths below computes it, on every
// CPU with AVX2 (others round one sum more).
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
constexpr float ROUNDS = 0x1.8p23f;  // a float above this has no fraction: adding it rounds to the nearest integer

// One lane for each channel of a tile; compilers split what is wider than the registers of the CPU.
typedef float Floats __attribute__((vector_size(4 * CHANNELS)));
typedef int32_t Ints __attribute__((vector_size(4 * CHANNELS)));
typedef uint32_t Words __attribute__((vector_size(4 * CHANNELS)));
typedef uint8_t Bytes __attribute__((vector_size(4 * CHANNELS)));
typedef uint16_t Halves __attribute__((vector_size(2 * CHANNELS)));
typedef uint8_t Quarters __attribute__((vector_size(CHANNELS)));

template <int BITS> struct Tile;  // 16 channels of a group

template <> struct Tile<4> {  // 4.75 bits a weight
    uint8_t levels[GROUP / 8][4 * CHANNELS];  // [j][4 c + i]: of channel c, 4 j + i in the low half and 16 further on in the high
    uint16_t scale[CHANNELS];
    uint8_t zero[CHANNELS];
};

template <> struct Tile<8> {  // 8.5 bits a weight
    uint8_t levels[GROUP / 4][4 * CHANNELS];  // [j][4 c + i]: of channel c, 4 j + i
    uint16_t scale[CHANNELS];
};

constexpr int MIDDLE = 128;  // the level of 0 in 8 bits
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool SIGNED = true;  // in 8 bits products are those of level - MIDDLE
#else
constexpr bool SIGNED = false;
#endif

template <int BITS> constexpr float ZERO_STEP = 1.0f / 16;  // what zeros are counted in
template <> constexpr float ZERO_STEP<8> = SIGNED ? 0 : MIDDLE;

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

template <int BITS> Floats scales(const Tile<BITS>& tile) { return (Floats)(widen(load<Halves>(tile.scale)) << 16); }

Floats zeros(const Tile<4>& tile) {  // in two steps, which compilers have instructions for
    return __builtin_convertvector((Ints)widen(__builtin_convertvector(load<Quarters>(tile.zero), Halves)), Floats);
}

Floats zeros(const Tile<8>&) { return Floats{} + 1; }

// The 32 levels of each channel, four neighbours to a lane.
void unpack(const Tile<4>& tile, Bytes levels[GROUP / 4]) {
    for (int j = 0; j < GROUP / 8; j++) {
        Words packed = load<Words>(tile.levels[j]);
        levels[j] = (Bytes)(packed & 0x0f0f0f0f);
        levels[j + GROUP / 8] = (Bytes)(packed >> 4 & 0x0f0f0f0f);
    }
}

void unpack(const Tile<8>& tile, Bytes levels[GROUP / 4]) {
    for (int j = 0; j < GROUP / 4; j++) levels[j] = load<Bytes>(tile.levels[j]) ^ uint8_t(SIGNED ? MIDDLE : 0);
}

// sum + four products a lane: levels by the same four signed activations.
template <int BITS> Ints dot(Ints sum, Bytes levels, int32_t activations) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)levels, _mm512_set1_epi32(activations));
#elif defined(__AVX2__)
    __m256i x = _mm256_set1_epi32(activations);
    for (int half = 0; half < 2; half++) {
        __m256i s = load<__m256i>((char*)&sum + 32 * half), l = load<__m256i>((char*)&levels + 32 * half);
#if defined(__AVXVNNI__)
        s = _mm256_dpbusd_avx_epi32(s, l, x);
#else  // unsigned by signed bytes, two products added in 16 bits, which hold 2 * 15 * 127 and 2 * 128 * 127, not 2 * 255 * 127
        const __m256i pairs = BITS == 4 ? _mm256_maddubs_epi16(l, x)
                                        : _mm256_maddubs_epi16(_mm256_abs_epi8(l), _mm256_sign_epi8(x, l));
        s = _mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
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
    std::vector<float> scale, sum;  // [rows, groups]; the sum in steps of a zero

    Rows(const Input& input, long rows, long inputs, float zero_step)
        : groups(groups_of(inputs)), levels(rows * groups * GROUP), scale(rows * groups), sum(rows * groups) {
        std::vector<float> prepared(groups * GROUP);
        for (long row = 0; row < rows; row++) {
            prepare(input, row, inputs, prepared.data());
            for (long group = 0; group < groups; group++) quantise(&prepared[group * GROUP], row * groups + group, zero_step);
        }
    }

    void quantise(const float* x, long at, float zero_step) {
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
        sum[at] = sum_of_levels * zero_step;
    }
};

// The tile that will be wanted a while after this one.
template <int BITS> void prefetch(const Tile<BITS>* tile) {
    constexpr int AHEAD = 24 * sizeof(Tile<4>) / sizeof *tile;
    for (size_t line = 0; line < sizeof *tile; line += 64) __builtin_prefetch((const char*)(tile + AHEAD) + line);
}

// sum += scale (products - zero). The difference is exact; whether product and sum are rounded together is the compiler's
// choice, for all paths here: together where the CPU can, as every one with AVX2.
void add_scaled(Floats& sum, Ints products, Floats scale, Floats zero) {
    sum += (__builtin_convertvector(products, Floats) - zero) * scale;
}

// y [.., outputs] of R rows and one tile of channels.
template <int BITS, int R>
void multiply(const Tile<BITS>* tile, const Rows& x, long row, const float* bias, Floats* y) {
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
                products = dot<BITS>(products, weights[j], load<int32_t>(levels + (r * x.groups + group) * GROUP + 4 * j));
            long at = r * x.groups + group;
            add_scaled(results[r], products, scale * x_scale[at], zero * x_sum[at]);
        }
    }
    for (int r = 0; r < R; r++) y[r] = results[r];
}

constexpr long FEW_ROWS = 8;  // whose sums fit the registers beside a group of weights

template <int BITS>
void multiply_few(const Tile<BITS>* tile, const Rows& x, long row, long rows, const float* bias, Floats* y) {
    constexpr decltype(&multiply<BITS, 1>) BY_ROWS[] = {multiply<BITS, 1>, multiply<BITS, 2>, multiply<BITS, 3>,
                                                        multiply<BITS, 4>, multiply<BITS, 5>, multiply<BITS, 6>,
                                                        multiply<BITS, 7>, multiply<BITS, 8>};
    BY_ROWS[rows - 1](tile, x, row, bias, y);
}

#if defined(__AMX_INT8__) && defined(__AVX512F__)
// For more rows: AMX multiplies 16 at a time, and what is left is to scale and add the groups' sums.
constexpr long AMX_ROWS = 16, FEWEST_FOR_AMX = 5;

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

template <int BITS>
void multiply_amx(const Tile<BITS>* tile, const Rows& x, long row, long rows, const float* bias, Floats* y) {
    // Each twice: the sums of four groups are computed while those of the four before are scaled and added.
    Bytes unpacked[2][AT_A_TIME][GROUP / 4];  // of 4 bits; those of 8 are as AMX takes them
    Floats scale[2][AT_A_TIME], zero[2][AT_A_TIME];
    Ints products[2][AT_A_TIME][AMX_ROWS];
    const auto unpack_for = [&](long group) {
        if constexpr (BITS == 4) unpack(tile[group], unpacked[group / AT_A_TIME % 2][group % AT_A_TIME]);
    };
    const auto weights = [&](long group) -> const void* {
        if constexpr (BITS == 4) return unpacked[group / AT_A_TIME % 2][group % AT_A_TIME];
        return tile[group].levels;
    };
    const auto add = [&](long group, long first, long end) {
        const int half = group / AT_A_TIME % 2;
        for (long r = first; r < end; r++) {
            const long at = (row + r) * x.groups + group;
            Floats sum = y[r];
#pragma GCC unroll 4
            for (int i = 0; i < AT_A_TIME; i++)
                add_scaled(sum, products[half][i][r], scale[half][i] * x.scale[at + i], zero[half][i] * x.sum[at + i]);
            y[r] = sum;
        }
    };
    const int8_t* levels = &x.levels[row * x.groups * GROUP];
    const long stride = x.groups * GROUP;
    for (long r = 0; r < rows; r++) y[r] = load<Floats>(bias);
    for (int i = 0; i < AT_A_TIME; i++) unpack_for(i);
    __asm__ volatile("" ::: "memory");  // AMX reads them, which compilers are not told
    for (long group = 0; group < x.groups; group += AT_A_TIME) {
        const long before = group - AT_A_TIME, next = group + AT_A_TIME, half = group / AT_A_TIME % 2;
        // In small pieces: what AMX does, what memory is asked for and what is done beside it run at the same time.
#define GROUP_SUMS(i, a, w)                                        \
    _tile_zero(i);                                                 \
    _tile_loadd(a, levels + (group + i) * GROUP, stride);          \
    _tile_loadd(w, weights(group + i), 64);                        \
    _tile_dpbsud(i, a, w);                                         \
    prefetch(tile + next + i);                                     \
    if (next < x.groups) unpack_for(next + i);                     \
    scale[half][i] = scales(tile[group + i]);                      \
    zero[half][i] = zeros(tile[group + i]);                        \
    if (group) add(before, rows * i / AT_A_TIME, rows * (i + 1) / AT_A_TIME);
        GROUP_SUMS(0, 4, 6)
        GROUP_SUMS(1, 5, 7)
        GROUP_SUMS(2, 4, 6)
        GROUP_SUMS(3, 5, 7)
#undef GROUP_SUMS
        _tile_stored(0, products[half][0], 64);
        _tile_stored(1, products[half][1], 64);
        _tile_stored(2, products[half][2], 64);
        _tile_stored(3, products[half][3], 64);
    }
    add(x.groups - AT_A_TIME, 0, rows);
}
#else
constexpr long AMX_ROWS = FEW_ROWS, FEWEST_FOR_AMX = 0;
bool amx_is_permitted() { return false; }
struct AmxShapes {
    explicit AmxShapes(long) {}
};
template <int BITS> constexpr auto multiply_amx = multiply_few<BITS>;
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
        const float sixteenths = std::min(255.0f, std::max(0.0f, std::nearbyint((-low * inverse - cut) / ZERO_STEP<4>)));
        const float offset = sixteenths * ZERO_STEP<4>;
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

// Channel c of a tile. Returns whether its weights are finite numbers, below 1e18.
bool pack(const float w[GROUP], long c, Tile<4>& tile) {
    uint8_t levels[GROUP] = {};
    const bool finite = quantise(w, levels, tile.scale[c], tile.zero[c]);
    for (int i = 0; i < GROUP / 2; i++) tile.levels[i / 4][4 * c + i % 4] = levels[i] | levels[i + GROUP / 2] << 4;
    return finite;
}

bool pack(const float w[GROUP], long c, Tile<8>& tile) {
    float most = 0;
    bool finite = true;
    for (int i = 0; i < GROUP; i++) most = std::max(most, std::abs(w[i])), finite = finite && std::abs(w[i]) < 1e18f;
    tile.scale[c] = to_bfloat16(finite ? most / 127 : 0);
    const float step = from_bfloat16(tile.scale[c]), inverse = step >= std::numeric_limits<float>::min() ? 1 / step : 0;
    for (int i = 0; i < GROUP; i++) {  // the largest is never cut: rounding a scale moves it by a quarter of a step
        const float q = finite ? std::max(-127.0f, std::min(127.0f, std::nearbyint(w[i] * inverse))) : 0;
        tile.levels[i / 4][4 * c + i % 4] = MIDDLE + int(q);
    }
    return finite;
}

float weight_of(const Tile<4>& tile, long c, long i) {
    const long at = i % (GROUP / 2);
    const int level = tile.levels[at / 4][4 * c + at % 4] >> (i < GROUP / 2 ? 0 : 4) & 15;
    return from_bfloat16(tile.scale[c]) * (level - tile.zero[c] * ZERO_STEP<4>);
}

float weight_of(const Tile<8>& tile, long c, long i) {
    return from_bfloat16(tile.scale[c]) * (tile.levels[i / 4][4 * c + i % 4] - MIDDLE);
}

// Fetching ahead ends at a page: a core reads a quarter more from large ones. To be asked before memory is first used.
void ask_for_huge_pages(uint8_t* from, long bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = 2 << 20;
    const uintptr_t first = ((uintptr_t)from + PAGE - 1) / PAGE * PAGE, last = ((uintptr_t)from + bytes) / PAGE * PAGE;
    if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);  // no matter if it is refused
#endif
}

template <int BITS> long bytes(long outputs, long inputs) {
    return (outputs + CHANNELS - 1) / CHANNELS * groups_of(inputs) * sizeof(Tile<BITS>);
}

template <int BITS> int pack(const uint16_t* weight, long outputs, long inputs, uint8_t* to) {
    const long groups = groups_of(inputs), tiles = (outputs + CHANNELS - 1) / CHANNELS;
    int finite = 1;
    ask_for_huge_pages(to, bytes<BITS>(outputs, inputs));
    std::memset(to, 0, bytes<BITS>(outputs, inputs));
#pragma omp parallel for reduction(&& : finite)
    for (long t = 0; t < tiles; t++)
        for (long group = 0; group * GROUP < inputs; group++)
            for (long c = 0; c < std::min(CHANNELS, outputs - t * CHANNELS); c++) {
                float w[GROUP] = {};
                const uint16_t* from = weight + (t * CHANNELS + c) * inputs + group * GROUP;
                for (long i = 0; i < std::min(GROUP, inputs - group * GROUP); i++) w[i] = from_bfloat16(from[i]);
                finite = pack(w, c, ((Tile<BITS>*)to)[t * groups + group]) && finite;
            }
    return finite;
}

template <int BITS> void unpack(const uint8_t* from, long outputs, long inputs, float* weight) {
    const long groups = groups_of(inputs);
    const Tile<BITS>* tiles = (const Tile<BITS>*)from;
    for (long n = 0; n < outputs; n++)
        for (long k = 0; k < inputs; k++)
            weight[n * inputs + k] = weight_of(tiles[n / CHANNELS * groups + k / GROUP], n % CHANNELS, k % GROUP);
}

template <int BITS>
void linear(const uint8_t* weight, const float* bias, const Input& input, float* y, int add, long rows, long outputs,
            long inputs) {
    const Rows activations(input, rows, inputs, ZERO_STEP<BITS>);
    const Tile<BITS>* tiles = (const Tile<BITS>*)weight;
    const bool amx = rows >= FEWEST_FOR_AMX && amx_is_permitted();
    const long at_once = amx ? AMX_ROWS : FEW_ROWS;
#pragma omp parallel
    for (long row = 0; row < rows; row += at_once) {
        const long part = std::min(at_once, rows - row);
        const AmxShapes shapes(amx ? part : 0);
#pragma omp for schedule(static)
        for (long channel = 0; channel < outputs; channel += CHANNELS) {
            const Tile<BITS>* tile = tiles + channel / CHANNELS * activations.groups;
            Floats sums[AMX_ROWS];
            (amx ? multiply_amx<BITS> : multiply_few<BITS>)(tile, activations, row, part, bias + channel, sums);
            const long channels = std::min(CHANNELS, outputs - channel);
            for (long r = 0; r < part; r++) {
                float* to = y + (row + r) * outputs + channel;
                for (long c = 0; c < channels; c++) to[c] = add ? to[c] + sums[r][c] : sums[r][c];
            }
        }
    }
}

}  // namespace

// `bits` of a weight: 4 or 8.
extern "C" {

// Bytes of the tiles of a weight [outputs, inputs].
long quantised_bytes(int bits, long outputs, long inputs) { return (bits == 4 ? bytes<4> : bytes<8>)(outputs, inputs); }

// weight [outputs, inputs] in bfloat16 -> tiles. Returns whether all weights are finite numbers, below 1e18.
int quantised_pack(int bits, const uint16_t* weight, long outputs, long inputs, uint8_t* to) {
    return (bits == 4 ? pack<4> : pack<8>)(weight, outputs, inputs, to);
}

// What the tiles stand for: weight [outputs, inputs].
void quantised_unpack(int bits, const uint8_t* from, long outputs, long inputs, float* weight) {
    (bits == 4 ? unpack<4> : unpack<8>)(from, outputs, inputs, weight);
}

// y [rows, outputs] = x W^T + bias, which has outputs padded to whole tiles; `add`: is added to what is in y.
void quantised_linear(int bits, const uint8_t* weight, const float* bias, const float* x, const float* norm,
                      float epsilon, int gated, float* y, int add, long rows, long outputs, long inputs) {
    const Input input{x, norm, epsilon, gated != 0};
    (bits == 4 ? linear<4> : linear<8>)(weight, bias, input, y, add, rows, outputs, inputs);
}
}
