// What a test calls, behind copy.cu: every thread of a launch. The answer is how many words were
// not at a multiple of their size.

template <typename Kernel>
static std::uint64_t every_thread(unsigned blocks, Kernel kernel) {
    unaligned = 0;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < BLOCK_THREADS; ++threadIdx.x) {
            kernel();
        }
    }
    return unaligned;
}

#define TERRANE_ENTRY(WIDTH)                                                                       \
    extern "C" std::uint64_t terrane_grid_copy_##WIDTH##_on_host(                                  \
        const GridCopy *grid, const GridSchedule *schedule, unsigned blocks) {                     \
        return every_thread(blocks, [=] { terrane_grid_copy_##WIDTH(*grid, *schedule); });         \
    }                                                                                              \
    extern "C" std::uint64_t terrane_run_copy_##WIDTH##_on_host(const RunCopy *copy,               \
                                                                const unsigned *share,             \
                                                                unsigned blocks) {                 \
        return every_thread(blocks, [=] { terrane_run_copy_##WIDTH(*copy, *share); });             \
    }

TERRANE_ENTRY(16)
TERRANE_ENTRY(8)
TERRANE_ENTRY(4)
TERRANE_ENTRY(2)
TERRANE_ENTRY(1)
