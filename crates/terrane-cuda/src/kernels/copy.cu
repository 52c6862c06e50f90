// Kernels that copy many cells. Each end is device memory, or pinned host memory at its device
// address. `cargo xtask kernels build` compiles this file to copy.ptx.
//
// arguments.rs documents the parameters and the kernels. schedule.rs and transpose.rs split the
// work. No thread waits for another thread block, so any number of thread blocks completes the work.

typedef unsigned int u32;
typedef unsigned long long u64;

// Threads per thread block and per warp; words in flight per thread and per warp.
enum : u32 { BLOCK_THREADS = 512, WARP_THREADS = 32, IN_FLIGHT = 4, TILE_WORDS = 128 };
static_assert(TILE_WORDS == WARP_THREADS * IN_FLIGHT, "a warp has a tile in flight");

// `BlockIds` of arguments.rs.
enum BlockIds : u32 { IDS_IDENTITY = 0, IDS_LISTED = 1, IDS_INLINE = 2 };

// `Split` of schedule.rs.
enum Split : u32 { SPLIT_CELLS = 0, SPLIT_PIECES = 1, SPLIT_GROUPS = 2 };

struct CopyEnd {
    u64 base;
    u64 bases;
    u64 bases_bits;
    u64 blocks;
    u32 block_ids;
    u32 first_inline;
    u64 block_stride;
    u64 layer_stride;
    u64 outer_stride;
    u64 row_stride;
    u64 column_stride;
};

struct GridCopy {
    u32 pairs;
    u32 layers;
    u32 outers;
    u32 rows;
    u32 columns;
    u32 reserved;
    u64 bytes;
    CopyEnd source;
    CopyEnd destination;
    u32 inline_blocks[256];
};

// A number below 2^31 divided by `value` is its high product with `multiplier`, shifted right.
struct Divisor {
    u32 value;
    u32 multiplier;
    u32 shift;
};

struct GridSchedule {
    u32 split;
    u32 tiles;
    u64 cell_words;
    u32 cells;
    u32 group_cells;
    u32 piece_words;
    Divisor tiles_per_unit;
    Divisor words_per_cell;
    Divisor columns;
    Divisor rows;
    Divisor outers;
    Divisor layers;
};

struct TransposeSchedule {
    u32 tiles;
    u32 row_bits;
    u32 column_bits;
    Divisor tiles_per_piece;
    Divisor tiles_per_row;
    Divisor outers;
    Divisor layers;
};

// The structs have no padding, except at the end. arguments.rs and schedule.rs also check the sizes
// and the order of the fields.
static_assert(sizeof(CopyEnd) == 80, "CopyEnd");
static_assert(sizeof(GridCopy) == 1216, "GridCopy");
static_assert(sizeof(GridSchedule) == 104, "GridSchedule");
static_assert(sizeof(TransposeSchedule) == 60, "TransposeSchedule");

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

// Loads through the L2 cache, without the L1 cache. Loads with a hint that the word is not read
// again made copies of a gigabyte 1 to 2 % slower. Loads through the read-only cache require memory
// that nothing writes during the kernel.
template <typename Word>
__device__ __forceinline__ Word load(const Word *from) {
    return __ldcg(from);
}

// A streaming store, because the written words are not read soon.
template <typename Word>
__device__ __forceinline__ void store(Word *to, Word word) {
    __stcs(to, word);
}

// The addresses of a cell or a piece at both ends.
struct Places {
    u64 source;
    u64 destination;
};

__device__ __forceinline__ u64 piece_place(const GridCopy &grid, const CopyEnd &end, u32 pair,
                                           u32 layer, u32 outer) {
    u64 block = pair;
    if (end.block_ids == IDS_LISTED) {
        block = reinterpret_cast<const u32 *>(end.blocks)[pair];
    } else if (end.block_ids == IDS_INLINE) {
        block = grid.inline_blocks[end.first_inline + pair];
    }
    u64 place = end.base + block * end.block_stride + layer * end.layer_stride +
                outer * end.outer_stride;
    if (end.bases != 0) {
        place += reinterpret_cast<const u64 *>(end.bases)[layer];
    }
    return place;
}

// The addresses of the piece with this number. Outers vary fastest, then layers, then pairs.
template <typename Schedule>
__device__ __forceinline__ Places piece_places(const GridCopy &grid, const Schedule &schedule,
                                               u32 piece) {
    u32 outer = take(piece, schedule.outers);
    u32 layer = take(piece, schedule.layers);
    return {piece_place(grid, grid.source, piece, layer, outer),
            piece_place(grid, grid.destination, piece, layer, outer)};
}

__device__ __forceinline__ void add_cell(const GridCopy &grid, Places &places, u32 row,
                                         u32 column) {
    places.source += row * grid.source.row_stride + column * grid.source.column_stride;
    places.destination +=
        row * grid.destination.row_stride + column * grid.destination.column_stride;
}

// The addresses of the cell with this number. Columns vary fastest, then rows, then pieces.
__device__ __forceinline__ Places cell_places(const GridCopy &grid, const GridSchedule &schedule,
                                              u32 cell) {
    u32 column = take(cell, schedule.columns);
    u32 row = take(cell, schedule.rows);
    Places places = piece_places(grid, schedule, cell);
    add_cell(grid, places, row, column);
    return places;
}

// Copies one tile with `lanes` threads; its words are contiguous at both ends. Each thread issues
// all loads before its first store. `words` words follow `places`. `lane` is the number of this
// thread.
template <typename Word>
__device__ __forceinline__ void copy_tile(const Places &places, u64 first, u64 words, u32 lane,
                                          u32 lanes) {
    const Word *from = reinterpret_cast<const Word *>(places.source) + first + lane;
    Word *to = reinterpret_cast<Word *>(places.destination) + first + lane;
    Word held[IN_FLIGHT];
    if (words - first >= static_cast<u64>(lanes) * IN_FLIGHT) {
#pragma unroll
        for (u32 k = 0; k < IN_FLIGHT; ++k) {
            held[k] = load(from + k * lanes);
        }
#pragma unroll
        for (u32 k = 0; k < IN_FLIGHT; ++k) {
            store(to + k * lanes, held[k]);
        }
        return;
    }
    u32 left = static_cast<u32>(words - first);
#pragma unroll
    for (u32 k = 0; k < IN_FLIGHT; ++k) {
        if (lane + k * lanes < left) {
            held[k] = load(from + k * lanes);
        }
    }
#pragma unroll
    for (u32 k = 0; k < IN_FLIGHT; ++k) {
        if (lane + k * lanes < left) {
            store(to + k * lanes, held[k]);
        }
    }
}

// Long cells: each tile is a part of one cell, and is copied by one warp.
template <typename Word>
__device__ __forceinline__ void copy_cells(const GridCopy &grid, const GridSchedule &schedule,
                                           u32 warp, u32 warps, u32 lane) {
    for (u32 tile = warp; tile < schedule.tiles; tile += warps) {
        u32 cell = tile;
        u64 first = static_cast<u64>(take(cell, schedule.tiles_per_unit)) * TILE_WORDS;
        Places places = cell_places(grid, schedule, cell);
        copy_tile<Word>(places, first, schedule.cell_words, lane, WARP_THREADS);
    }
}

// Short cells in long pieces: each tile is consecutive cells of one piece, and is copied by one
// warp.
template <typename Word>
__device__ __forceinline__ void copy_pieces(const GridCopy &grid, const GridSchedule &schedule,
                                            u32 warp, u32 warps, u32 lane) {
    for (u32 tile = warp; tile < schedule.tiles; tile += warps) {
        u32 piece = tile;
        u32 first = take(piece, schedule.tiles_per_unit) * TILE_WORDS + lane;
        Places begin = piece_places(grid, schedule, piece);
        Word held[IN_FLIGHT];
        Word *to[IN_FLIGHT];
#pragma unroll
        for (u32 k = 0; k < IN_FLIGHT; ++k) {
            u32 number = first + k * WARP_THREADS;
            to[k] = nullptr;
            if (number < schedule.piece_words) {
                u32 word = take(number, schedule.words_per_cell);
                u32 column = take(number, schedule.columns);
                Places places = begin;
                add_cell(grid, places, number, column);
                held[k] = load(reinterpret_cast<const Word *>(places.source) + word);
                to[k] = reinterpret_cast<Word *>(places.destination) + word;
            }
        }
#pragma unroll
        for (u32 k = 0; k < IN_FLIGHT; ++k) {
            if (to[k] != nullptr) {
                store(to[k], held[k]);
            }
        }
    }
}

// Short cells in short pieces: each tile is a group of cells, and is copied by one warp.
template <typename Word>
__device__ __forceinline__ void copy_groups(const GridCopy &grid, const GridSchedule &schedule,
                                            u32 warp, u32 warps, u32 lane) {
    for (u32 tile = warp; tile < schedule.tiles; tile += warps) {
        u32 first_cell = tile * schedule.group_cells;
        u32 cells = min(schedule.group_cells, schedule.cells - first_cell);
        u32 words = cells * schedule.words_per_cell.value;
        for (u32 first = lane; first < words; first += TILE_WORDS) {
            Word held[IN_FLIGHT];
            Word *to[IN_FLIGHT];
#pragma unroll
            for (u32 k = 0; k < IN_FLIGHT; ++k) {
                u32 number = first + k * WARP_THREADS;
                to[k] = nullptr;
                if (number < words) {
                    u32 word = take(number, schedule.words_per_cell);
                    Places places = cell_places(grid, schedule, first_cell + number);
                    held[k] = load(reinterpret_cast<const Word *>(places.source) + word);
                    to[k] = reinterpret_cast<Word *>(places.destination) + word;
                }
            }
#pragma unroll
            for (u32 k = 0; k < IN_FLIGHT; ++k) {
                if (to[k] != nullptr) {
                    store(to[k], held[k]);
                }
            }
        }
    }
}

template <typename Word>
__device__ __forceinline__ void copy_grid(const GridCopy &grid, const GridSchedule &schedule) {
    u32 thread = blockIdx.x * BLOCK_THREADS + threadIdx.x;
    u32 warp = thread / WARP_THREADS;
    u32 lane = thread % WARP_THREADS;
    u32 warps = gridDim.x * (BLOCK_THREADS / WARP_THREADS);
    if (schedule.split == SPLIT_CELLS) {
        copy_cells<Word>(grid, schedule, warp, warps, lane);
    } else if (schedule.split == SPLIT_PIECES) {
        copy_pieces<Word>(grid, schedule, warp, warps, lane);
    } else {
        copy_groups<Word>(grid, schedule, warp, warps, lane);
    }
}

// Cells of one word. Rows are contiguous at the source, columns at the destination. When a thread
// block reads a tile, adjacent threads read adjacent rows. When it writes the tile, adjacent
// threads write adjacent columns.
template <typename Word>
__device__ __forceinline__ void copy_transposed(const GridCopy &grid,
                                                const TransposeSchedule &schedule) {
    // 48 KiB of shared memory are available without a request.
    constexpr u32 WORDS = sizeof(Word) == 16 ? 2048 : 4096;
    constexpr u32 EACH = WORDS / BLOCK_THREADS;
    // One padding word per column, so that the words of a row are in different banks.
    __shared__ Word words[WORDS + WORDS / 8];
    u32 rows = 1u << schedule.row_bits;
    u32 columns = 1u << schedule.column_bits;
    u32 pitch = rows + 1;
    for (u32 tile = blockIdx.x; tile < schedule.tiles; tile += gridDim.x) {
        u32 piece = tile;
        u32 first = take(piece, schedule.tiles_per_piece);
        u32 first_column = take(first, schedule.tiles_per_row) << schedule.column_bits;
        u32 first_row = first << schedule.row_bits;
        Places places = piece_places(grid, schedule, piece);
        add_cell(grid, places, first_row, first_column);
        u32 rows_left = grid.rows - first_row;
        u32 columns_left = grid.columns - first_column;
        Word held[EACH];
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            u32 at = threadIdx.x + k * BLOCK_THREADS;
            u32 row = at & (rows - 1);
            u32 column = at >> schedule.row_bits;
            if (column < columns && row < rows_left && column < columns_left) {
                held[k] = load(reinterpret_cast<const Word *>(
                    places.source + row * grid.source.row_stride +
                    column * grid.source.column_stride));
            }
        }
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            u32 at = threadIdx.x + k * BLOCK_THREADS;
            u32 row = at & (rows - 1);
            u32 column = at >> schedule.row_bits;
            if (column < columns && row < rows_left && column < columns_left) {
                words[column * pitch + row] = held[k];
            }
        }
        __syncthreads();
#pragma unroll
        for (u32 k = 0; k < EACH; ++k) {
            u32 at = threadIdx.x + k * BLOCK_THREADS;
            u32 column = at & (columns - 1);
            u32 row = at >> schedule.column_bits;
            if (row < rows && row < rows_left && column < columns_left) {
                store(reinterpret_cast<Word *>(places.destination +
                                               row * grid.destination.row_stride +
                                               column * grid.destination.column_stride),
                      words[column * pitch + row]);
            }
        }
        __syncthreads();
    }
}

// One entry point per word width. Two thread blocks fit on a multiprocessor.
#define TERRANE_COPIES(WIDTH, WORD)                                                                \
    static_assert(sizeof(WORD) == WIDTH, "the width of a word");                                  \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2) terrane_grid_copy_##WIDTH(      \
        const __grid_constant__ GridCopy grid, const __grid_constant__ GridSchedule schedule) {    \
        copy_grid<WORD>(grid, schedule);                                                           \
    }                                                                                              \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2) terrane_transposed_copy_##WIDTH( \
        const __grid_constant__ GridCopy grid,                                                     \
        const __grid_constant__ TransposeSchedule schedule) {                                      \
        copy_transposed<WORD>(grid, schedule);                                                     \
    }

TERRANE_COPIES(16, uint4)
TERRANE_COPIES(8, uint2)
TERRANE_COPIES(4, unsigned int)
TERRANE_COPIES(2, unsigned short)
TERRANE_COPIES(1, unsigned char)
