// Kernels that compute checksums of blocks in device memory. `cargo xtask kernels build` compiles
// this file to block_sums.ptx.
//
// sum_arguments.rs documents the parameter. The bits of a number are the coefficients of a
// polynomial. Bit 63 is the coefficient of 1, as in the checksum itself.

typedef unsigned int u32;
typedef unsigned long long u64;

// VECTOR_BYTES: folded by one lane in one step. ROW_BYTES: folded by one warp in one step.
enum : u32 { BLOCK_THREADS = 512, WARP_THREADS = 32, VECTOR_BYTES = 16, ROW_BYTES = 512 };
enum : u32 { SECTIONS = 16, LEVELS = 6 };
static_assert(ROW_BYTES == WARP_THREADS * VECTOR_BYTES, "a vector for each lane");

// The polynomial of CRC-64/NVME, without its highest power.
#define POLYNOMIAL 0x9A6C9329AC4BC9B5ull

// A number below 2^31 divided by `value` is its high product with `multiplier`, shifted right.
struct Divisor {
    u32 value;
    u32 multiplier;
    u32 shift;
};

struct SumLevel {
    Divisor count;
    u32 first;
    u64 stride;
};

struct SumSection {
    u32 first_word;
    u32 levels;
    Divisor unit_words;
    u32 reserved;
    SumLevel level[6];
};

struct SumLaunch {
    u64 sums;
    u64 places;
    u64 layer_places;
    u64 factors;
    u32 first_pair;
    u32 units;
    u32 block_words;
    u32 layered_words;
    u32 segment_words;
    u32 sections;
    u32 layered_sections;
    u32 layers;
    Divisor segments;
    Divisor layer_words;
    u64 fold[64];
    u64 lanes[64];
    SumSection section[16];
};

// sum_arguments.rs also checks the sizes and the order of the fields.
static_assert(sizeof(SumLevel) == 24, "SumLevel");
static_assert(sizeof(SumSection) == 168, "SumSection");
static_assert(sizeof(SumLaunch) == 3800, "SumLaunch");

__device__ __forceinline__ u32 quotient(u32 number, const Divisor &divisor) {
    return divisor.value == 1 ? number : __umulhi(number, divisor.multiplier) >> divisor.shift;
}

// Returns the remainder, and replaces the number by the quotient.
__device__ __forceinline__ u32 take(u32 &number, const Divisor &divisor) {
    u32 whole = quotient(number, divisor);
    u32 rest = number - whole * divisor.value;
    number = whole;
    return rest;
}

// The address of a word, and the number of adjacent words from there on.
struct Cursor {
    u64 address;
    u32 left;
};

template <u32 WIDTH>
__device__ __forceinline__ Cursor place(const SumLaunch &launch, u32 pair, u32 word) {
    u32 section = 0;
    u32 end = launch.layered_sections;
    u32 layer = 0;
    if (word < launch.layered_words) {
        layer = word;
        word = take(layer, launch.layer_words);
    } else {
        word -= launch.layered_words;
        section = launch.layered_sections;
        end = launch.sections;
    }
    while (section + 1 < end && launch.section[section + 1].first_word <= word) {
        ++section;
    }
    const SumSection &of = launch.section[section];
    u32 number = word - of.first_word;
    u32 within = take(number, of.unit_words);
    u64 address = reinterpret_cast<const u64 *>(launch.places)[pair * launch.sections + section] +
                  reinterpret_cast<const u64 *>(launch.layer_places)[section * launch.layers + layer] +
                  static_cast<u64>(within) * WIDTH;
    for (u32 k = 0; k < of.levels; ++k) {
        const SumLevel &level = of.level[k];
        number += level.first;
        address += take(number, level.count) * level.stride;
    }
    return {address, of.unit_words.value - within};
}

// Sixteen bytes as two polynomials.
struct Vector {
    u64 even;
    u64 odd;
};

// The vector that begins at this word of the block. Words before the block are zero. The cursor
// moves to the vector of the next row, if its address is known.
template <typename Word>
__device__ __forceinline__ Vector load(const SumLaunch &launch, u32 pair, int word,
                                       Cursor &cursor) {
    constexpr u32 WIDTH = sizeof(Word);
    constexpr u32 WORDS = VECTOR_BYTES / WIDTH;
    constexpr u32 SKIPPED = ROW_BYTES / WIDTH - WORDS;
    Vector vector = {0, 0};
    if constexpr (WORDS == 1) {
        if (word >= 0) {
            if (cursor.left == 0) {
                cursor = place<WIDTH>(launch, pair, static_cast<u32>(word));
            }
            // Without the L1 cache, because each word is read once.
            uint4 held = __ldcg(reinterpret_cast<const uint4 *>(cursor.address));
            vector.even = held.x | static_cast<u64>(held.y) << 32;
            vector.odd = held.z | static_cast<u64>(held.w) << 32;
            cursor.address += WIDTH;
            --cursor.left;
        }
    } else {
#pragma unroll 1
        for (u32 k = 0; k < WORDS; ++k, ++word) {
            if (word < 0) {
                continue;
            }
            if (cursor.left == 0) {
                cursor = place<WIDTH>(launch, pair, static_cast<u32>(word));
            }
            u64 held = static_cast<u64>(*reinterpret_cast<const Word *>(cursor.address));
            u32 at = k * WIDTH * 8;
            vector.even |= at < 64 ? held << (at & 63) : 0;
            vector.odd |= at < 64 ? 0 : held << (at & 63);
            cursor.address += WIDTH;
            --cursor.left;
        }
    }
    if (cursor.left > SKIPPED) {
        cursor.address += SKIPPED * WIDTH;
        cursor.left -= SKIPPED;
    } else {
        cursor.left = 0;
    }
    return vector;
}

// The polynomial times x to the number of bits of a row, modulo the checksum's polynomial.
__device__ __forceinline__ u64 fold(const u64 *table, u64 state) {
    u32 low = static_cast<u32>(state);
    u32 high = static_cast<u32>(state >> 32);
    u64 moved = table[low & 255] ^ table[256 + (low >> 8 & 255)];
    moved ^= table[512 + (low >> 16 & 255)] ^ table[768 + (low >> 24)];
    moved ^= table[1024 + (high & 255)] ^ table[1280 + (high >> 8 & 255)];
    return moved ^ table[1536 + (high >> 16 & 255)] ^ table[1792 + (high >> 24)];
}

// All ones if the lowest bit of the number is set.
__device__ __forceinline__ u64 mask(u64 number) {
    u32 half = 0 - (static_cast<u32>(number) & 1);
    return half | static_cast<u64>(half) << 32;
}

// even * even_factor + odd * odd_factor, modulo the polynomial.
__device__ __forceinline__ u64 products(u64 even, u64 even_factor, u64 odd, u64 odd_factor) {
    u64 sum = 0;
#pragma unroll 4
    for (u32 bit = 0; bit < 64; ++bit) {
        sum = (sum >> 1) ^ (POLYNOMIAL & mask(sum));
        sum ^= even_factor & mask(even >> bit);
        sum ^= odd_factor & mask(odd >> bit);
    }
    return sum;
}

__device__ __forceinline__ u64 product(u64 state, u64 factor) {
    u64 sum = 0;
#pragma unroll 4
    for (u32 bit = 0; bit < 64; ++bit) {
        sum = (sum >> 1) ^ (POLYNOMIAL & mask(sum)) ^ (factor & mask(state >> bit));
    }
    return sum;
}

// A warp sums one segment of a block at a time. Each lane folds every 32nd vector of the segment.
// The last segment ends at the end of the block. Only the first segment may be shorter than the
// others.
template <typename Word>
__device__ __forceinline__ void sum_blocks(const SumLaunch &launch) {
    constexpr u32 ROW_WORDS = ROW_BYTES / sizeof(Word);
    constexpr u32 VECTOR_WORDS = VECTOR_BYTES / sizeof(Word);
    __shared__ u64 table[8 * 256];
    __shared__ u64 sums[BLOCK_THREADS];
    for (u32 at = threadIdx.x; at < 8 * 256; at += BLOCK_THREADS) {
        u64 entry = 0;
#pragma unroll
        for (u32 bit = 0; bit < 8; ++bit) {
            entry ^= launch.fold[at / 256 * 8 + bit] & mask(at >> bit);
        }
        table[at] = entry;
    }
    __syncthreads();
    u32 thread = blockIdx.x * BLOCK_THREADS + threadIdx.x;
    u32 lane = thread % WARP_THREADS;
    u64 behind_even = launch.lanes[2 * lane];
    u64 behind_odd = launch.lanes[2 * lane + 1];
    u32 warps = gridDim.x * (BLOCK_THREADS / WARP_THREADS);
    for (u32 unit = thread / WARP_THREADS; unit < launch.units; unit += warps) {
        u32 pair = unit;
        u32 segment = take(pair, launch.segments);
        pair += launch.first_pair;
        u32 end = launch.block_words - (launch.segments.value - 1 - segment) * launch.segment_words;
        u32 words = min(end, launch.segment_words);
        u32 rows = (words + ROW_WORDS - 1) / ROW_WORDS;
        int word = static_cast<int>(end - rows * ROW_WORDS + lane * VECTOR_WORDS);
        Cursor cursor = {0, 0};
        u64 even = 0;
        u64 odd = 0;
        for (u32 row = 0; row < rows; ++row, word += ROW_WORDS) {
            Vector vector = load<Word>(launch, pair, word, cursor);
            even = fold(table, even) ^ vector.even;
            odd = fold(table, odd) ^ vector.odd;
        }
        sums[threadIdx.x] = products(even, behind_even, odd, behind_odd);
        __syncwarp();
        if (lane == 0) {
            u64 sum = 0;
            for (u32 other = 0; other < WARP_THREADS; ++other) {
                sum ^= sums[threadIdx.x + other];
            }
            sum = product(sum, reinterpret_cast<const u64 *>(launch.factors)[segment]);
            asm volatile("red.global.xor.b64 [%0], %1;" ::"l"(launch.sums + 8ull * pair), "l"(sum)
                         : "memory");
        }
        __syncwarp();
    }
}

// One entry point per word width. Two thread blocks fit on a multiprocessor.
#define TERRANE_SUMS(WIDTH, WORD)                                                                  \
    static_assert(sizeof(WORD) == WIDTH, "the width of a word");                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2) terrane_block_sums_##WIDTH(     \
        const __grid_constant__ SumLaunch launch) {                                                \
        sum_blocks<WORD>(launch);                                                                  \
    }

struct alignas(16) Sixteen {
    u64 words[2];
};

TERRANE_SUMS(16, Sixteen)
TERRANE_SUMS(8, unsigned long long)
TERRANE_SUMS(4, unsigned int)
TERRANE_SUMS(2, unsigned short)
TERRANE_SUMS(1, unsigned char)
