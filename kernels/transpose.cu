// Transposes matrices of float8 bytes, a square of 128 x 128 per block.
#include "table.cuh"

struct __align__(16) TransposeEntry {
    const u8* src;
    u8* dst;
    u64 rows, cols;
    u64 squares_across;  // squares in a row of squares
    u32 flags, reserved;
};
static_assert(sizeof(TransposeEntry) == 48, "src/cuda/tables.rs");

#define SQUARE 128

// Turns 4 x 4 bytes: word r holds row r before, column r after.
G8_FN void turn(u32 (&w)[4]) {
    u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    u32 c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

extern "C" __global__ void __launch_bounds__(THREADS) transpose(const TransposeEntry* entries, Tiles tiles) {
    // One word of padding per row, so that a column of words falls into as many banks.
    __shared__ u32 square[SQUARE][SQUARE / 4 + 1];
    const Place at = locate(tiles);  // a tile is one square, so the tile's first "element" is its number
    const TransposeEntry& e = entries[at.tensor];
    if (e.rows == 0 || e.cols == 0) return;
    const u64 top = at.begin / e.squares_across * SQUARE, left = at.begin % e.squares_across * SQUARE;
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    if ((e.flags & VECTOR) && top + SQUARE <= e.rows && left + SQUARE <= e.cols) {
        // Four rows and a word of columns per thread and turn.
#pragma unroll
        for (u32 r = warp * 4; r < SQUARE; r += THREADS / 32 * 4) {
            u32 w[4];
#pragma unroll
            for (int k = 0; k < 4; k++) w[k] = *(const u32*)(e.src + (top + r + k) * e.cols + left + lane * 4);
            turn(w);
#pragma unroll
            for (int k = 0; k < 4; k++) square[lane * 4 + k][r / 4] = w[k];
        }
        __syncthreads();
#pragma unroll
        for (u32 c = warp; c < SQUARE; c += THREADS / 32) *(u32*)(e.dst + (left + c) * e.rows + top + lane * 4) = square[c][lane];
        return;
    }
    u8* bytes = (u8*)&square[0][0];
    const u32 pitch = sizeof(square[0]), rows = (u32)(e.rows - top < SQUARE ? e.rows - top : SQUARE),
              cols = (u32)(e.cols - left < SQUARE ? e.cols - left : SQUARE);
    for (u32 r = warp; r < rows; r += THREADS / 32)
        for (u32 c = lane; c < cols; c += 32) bytes[c * pitch + r] = e.src[(top + r) * e.cols + left + c];
    __syncthreads();
    for (u32 c = warp; c < cols; c += THREADS / 32)
        for (u32 r = lane; r < rows; r += 32) e.dst[(left + c) * e.rows + top + r] = bytes[c * pitch + r];
}
