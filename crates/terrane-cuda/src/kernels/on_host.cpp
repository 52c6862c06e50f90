// Runs the kernels of copy.cu on the host, one thread after the other: for tests. copy.cu follows
// this text.

#include <algorithm>
#include <cstdint>

using std::min;

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct Index {
    unsigned x;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};

static thread_local Index blockIdx, threadIdx, gridDim;
static thread_local std::uint64_t unaligned;

static unsigned __umulhi(unsigned left, unsigned right) {
    return static_cast<unsigned>((static_cast<std::uint64_t>(left) * right) >> 32);
}

// The device refuses a word that is not at a multiple of its size; here it is counted, and copied
// byte by byte.
template <typename Word>
static Word __ldcg(const Word *from) {
    unaligned += reinterpret_cast<std::uintptr_t>(from) % sizeof(Word) != 0;
    Word word;
    __builtin_memcpy(&word, from, sizeof(Word));
    return word;
}

template <typename Word>
static void __stcs(Word *to, Word word) {
    unaligned += reinterpret_cast<std::uintptr_t>(to) % sizeof(Word) != 0;
    __builtin_memcpy(to, &word, sizeof(Word));
}
