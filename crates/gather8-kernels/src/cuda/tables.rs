//! What kernels read from device memory: one entry per tensor, as the `.cu` files declare them, and
//! the first tile of every tensor.

use bytemuck::{Pod, Zeroable};

/// Threads of most blocks (`THREADS`).
pub(super) const THREADS: u32 = 256;
/// Bytes of a tile of the amax pass (`AMAX_TILE_BYTES`).
pub(super) const AMAX_TILE_BYTES: u64 = 16384;
/// Elements that a block of the cast pass has in flight (`CAST_ROUND`), and rounds of a large tile.
pub(super) const CAST_ROUND: u64 = 256 * 8 * 4;
pub(super) const CAST_ROUNDS: u64 = 4;
/// The same for divide and accumulate (`UNARY_ROUND`).
pub(super) const UNARY_ROUND: u64 = 256 * 8 * 2;
pub(super) const UNARY_ROUNDS: u64 = 2;
/// The same for decode (`DECODE_ROUND`).
pub(super) const DECODE_ROUND: u64 = 256 * 8 * 4;
pub(super) const DECODE_ROUNDS: u64 = 2;
/// Threads of the optimizer's blocks with f32 moments (`WIDE_THREADS`), and rounds of a large tile.
pub(super) const WIDE_THREADS: u32 = 192;
pub(super) const WIDE_ROUNDS: u64 = 2;
/// The same with BF16 moments (`NARROW_THREADS`).
pub(super) const NARROW_THREADS: u32 = 128;
pub(super) const NARROW_ROUNDS: u64 = 3;
/// A side of the squares of the transpose pass (`SQUARE`).
pub(super) const SQUARE: u64 = 128;
/// Threads of the update's one block (`UPDATE_THREADS`).
pub(super) const UPDATE_THREADS: u32 = 1024;

/// Bits of an entry's flags (`VECTOR`, `IS_E5M2`).
pub(super) const VECTOR: u32 = 1;
pub(super) const IS_E5M2: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct AmaxEntry {
    pub(super) src: u64,
    pub(super) slot: u64,
    pub(super) elements: u64,
    pub(super) flags: u32,
    pub(super) reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct CastEntry {
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) scales: u64,
    pub(super) record: u64,
    pub(super) saturated: u64,
    pub(super) amax: u64,
    pub(super) arrived: u64,
    pub(super) elements: u64,
    pub(super) flags: u32,
    pub(super) reserved: [u32; 3],
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct DecodeEntry {
    pub(super) src: u64,
    pub(super) record: u64,
    pub(super) dst: u64,
    pub(super) elements: u64,
    pub(super) flags: u32,
    pub(super) reserved: [u32; 3],
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct UnaryEntry {
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) elements: u64,
    pub(super) flags: u32,
    pub(super) divisor: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct TransposeEntry {
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) rows: u64,
    pub(super) cols: u64,
    pub(super) squares_across: u64,
    pub(super) flags: u32,
    pub(super) reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct NormEntry {
    pub(super) src: u64,
    pub(super) tiles: u64,
    pub(super) elements: u64,
    pub(super) flags: u32,
    pub(super) reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct OptimizeEntry {
    pub(super) grad: u64,
    pub(super) exp_avg: u64,
    pub(super) exp_avg_sq: u64,
    pub(super) weight: u64,
    pub(super) master: u64,
    pub(super) group: u64,
    pub(super) control: u64,
    pub(super) amax: u64,
    pub(super) emit: u64,
    pub(super) scales: u64,
    pub(super) record: u64,
    pub(super) elements: u64,
    pub(super) flags: u32,
    pub(super) reserved: [u32; 3],
}

#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(super) struct UpdateEntry {
    pub(super) slots: u64,
    pub(super) bank: u64,
    pub(super) records: u64,
    pub(super) rings: u64,
    pub(super) status: u64,
    pub(super) history: u32,
    pub(super) most_recent: u32,
    pub(super) margin: u32,
    pub(super) power_of_two: u32,
    pub(super) reserved: u64,
}

/// The kernels' argument that says how blocks are dealt out (`Tiles`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub(super) struct Tiles {
    pub(super) first: u64,
    pub(super) tensors: u32,
    pub(super) size: u32,
}

/// The most blocks of a launch.
const MOST_BLOCKS: u64 = (1 << 31) - 1;

/// The first tile of every tensor, and at the end the number of tiles; a tensor without elements
/// has a tile all the same. `None` if there are more tiles than a launch may have blocks.
pub(super) fn first_tiles(elements: &[u64], size: u64) -> Option<Vec<u32>> {
    let mut first = Vec::with_capacity(elements.len() + 1);
    let mut total = 0_u64;
    first.push(0);
    for &elements in elements {
        total = total.checked_add(elements.div_ceil(size.max(1)).max(1))?;
        if total > MOST_BLOCKS {
            return None;
        }
        first.push(u32::try_from(total).ok()?);
    }
    Some(first)
}

/// Rounds of a tile: as many as `most`, but few enough that every multiprocessor gets at least 16
/// tiles, so that none waits long for the last one.
pub(super) fn rounds(elements: &[u64], round: u64, most: u64, multiprocessors: u32) -> u64 {
    let total: u64 = elements.iter().map(|elements| elements.div_ceil(round)).sum();
    (total / (u64::from(multiprocessors.max(1)) * 16)).clamp(1, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_as_large_as_the_kernels_say() {
        let sources = [
            include_str!("../../kernels/amax.cu"),
            include_str!("../../kernels/cast.cu"),
            include_str!("../../kernels/elementwise.cu"),
            include_str!("../../kernels/transpose.cu"),
            include_str!("../../kernels/norm.cu"),
            include_str!("../../kernels/optimize.cu"),
            include_str!("../../kernels/update_scales.cu"),
            include_str!("../../kernels/table.cuh"),
        ]
        .concat();
        let entries = [
            ("AmaxEntry", size_of::<AmaxEntry>()),
            ("CastEntry", size_of::<CastEntry>()),
            ("DecodeEntry", size_of::<DecodeEntry>()),
            ("UnaryEntry", size_of::<UnaryEntry>()),
            ("TransposeEntry", size_of::<TransposeEntry>()),
            ("NormEntry", size_of::<NormEntry>()),
            ("OptimizeEntry", size_of::<OptimizeEntry>()),
            ("UpdateEntry", size_of::<UpdateEntry>()),
            ("Tiles", size_of::<Tiles>()),
        ];
        for (name, size) in entries {
            let line = format!("static_assert(sizeof({name}) == {size},");
            assert!(sources.contains(&line), "no `{line}`");
        }
    }

    #[test]
    fn constants_are_those_of_the_kernels() {
        let sources = [
            include_str!("../../kernels/table.cuh"),
            include_str!("../../kernels/amax.cu"),
            include_str!("../../kernels/cast.cu"),
            include_str!("../../kernels/elementwise.cu"),
            include_str!("../../kernels/optimize.cu"),
            include_str!("../../kernels/transpose.cu"),
            include_str!("../../kernels/norm.cu"),
            include_str!("../../kernels/update_scales.cu"),
        ]
        .concat();
        let lines = [
            format!("#define THREADS {THREADS}\n"),
            format!("#define AMAX_TILE_BYTES {AMAX_TILE_BYTES}\n"),
            "#define CAST_GROUPS 4\n".to_owned(),
            "#define CAST_ROUND (THREADS * 8 * CAST_GROUPS)\n".to_owned(),
            "#define GROUPS 2  //".to_owned(),
            "#define DECODE_GROUPS 4\n".to_owned(),
            "#define DECODE_ROUND (THREADS * 8 * DECODE_GROUPS)\n".to_owned(),
            "#define UNARY_ROUND (THREADS * 8 * GROUPS)\n".to_owned(),
            format!("#define WIDE_THREADS {WIDE_THREADS}\n"),
            format!("#define NARROW_THREADS {NARROW_THREADS}\n"),
            format!("#define SQUARE {SQUARE}\n"),
            format!("#define NORM_TILE {}\n", crate::layout::NORM_TILE),
            format!("#define NORM_LANES {}\n", crate::layout::NORM_LANES),
            format!("#define NORM_FINAL_LANES {}\n", crate::layout::NORM_FINAL_LANES),
            format!("#define UPDATE_THREADS {UPDATE_THREADS}\n"),
            format!("VECTOR = {VECTOR};"),
            format!("IS_E5M2 = {IS_E5M2};"),
        ];
        for line in lines {
            assert!(sources.contains(&line), "no `{}`", line.trim());
        }
    }

    #[test]
    fn tiles_cover_every_tensor_and_count_the_empty_ones() {
        assert_eq!(first_tiles(&[], 8), Some(vec![0]));
        assert_eq!(first_tiles(&[0, 1, 8, 9, 0], 8), Some(vec![0, 1, 2, 3, 5, 6]));
        assert_eq!(first_tiles(&[u64::MAX], 1), None);
        let large = 1 << 40;
        assert_eq!(first_tiles(&[large], 8192).unwrap(), vec![0, 1 << 27]);
    }

    #[test]
    fn few_elements_get_small_tiles() {
        assert_eq!(rounds(&[1 << 30], CAST_ROUND, 4, 132), 4);
        assert_eq!(rounds(&[1 << 20], CAST_ROUND, 4, 132), 1);
        assert_eq!(rounds(&[], CAST_ROUND, 4, 132), 1);
    }
}
