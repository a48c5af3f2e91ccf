//! The checks of a call's lengths, the same for every communicator.

use gather8_kernels::{Backend, Span};

use crate::communicator::{Op, Reduce};
use crate::error::{Error, Result};

/// Every destination is `world` times its source, and a source that shares bytes with its
/// destination lies at its own place in it.
pub(crate) fn check_all_gather<B: Backend>(
    op: &Op<'_>,
    rank: u32,
    world: u32,
    parts: &[(Span<B>, Span<B>)],
) -> Result<()> {
    for (part, (source, destination)) in parts.iter().enumerate() {
        if source.len().checked_mul(u64::from(world)) != Some(destination.len()) {
            return Err(Error::length(
                op,
                part,
                format!(
                    "the destination holds {} bytes, not {world} times the source's {}",
                    destination.len(),
                    source.len()
                ),
            ));
        }
        own_place(op, part, rank, source, destination)?;
    }
    Ok(())
}

/// Every source is `world` times its destination and both hold whole elements; a destination that
/// shares bytes with its source lies at its own place in it.
pub(crate) fn check_reduce_scatter<B: Backend>(
    op: &Op<'_>,
    rank: u32,
    world: u32,
    reduce: Reduce,
    parts: &[(Span<B>, Span<B>)],
) -> Result<()> {
    for (part, (source, destination)) in parts.iter().enumerate() {
        if destination.len().checked_mul(u64::from(world)) != Some(source.len()) {
            return Err(Error::length(
                op,
                part,
                format!(
                    "the source holds {} bytes, not {world} times the destination's {}",
                    source.len(),
                    destination.len()
                ),
            ));
        }
        whole_elements(op, part, reduce, destination)?;
        own_place(op, part, rank, destination, source)?;
    }
    Ok(())
}

/// The span holds whole elements.
pub(crate) fn check_all_reduce<B: Backend>(
    op: &Op<'_>,
    reduce: Reduce,
    span: &Span<B>,
) -> Result<()> {
    whole_elements(op, 0, reduce, span)
}

/// The root is a rank.
pub(crate) fn check_root(op: &Op<'_>, root: u32, world: u32) -> Result<()> {
    if root < world {
        return Ok(());
    }
    Err(Error::Usage {
        operation: op.name.to_owned(),
        unit: op.unit.to_owned(),
        problem: format!("the root {root} is no rank of a group of {world}"),
    })
}

fn whole_elements<B: Backend>(
    op: &Op<'_>,
    part: usize,
    reduce: Reduce,
    span: &Span<B>,
) -> Result<()> {
    if span.len().is_multiple_of(reduce.size()) {
        return Ok(());
    }
    Err(Error::length(
        op,
        part,
        format!("{} bytes are no whole number of {}-byte elements", span.len(), reduce.size()),
    ))
}

fn own_place<B: Backend>(
    op: &Op<'_>,
    part: usize,
    rank: u32,
    piece: &Span<B>,
    whole: &Span<B>,
) -> Result<()> {
    let offset = u64::from(rank) * piece.len();
    if !overlap(piece, whole) || piece.range().start == whole.range().start + offset {
        return Ok(());
    }
    Err(Error::length(
        op,
        part,
        format!(
            "bytes {:?} share memory with {:?} but are not piece {rank} of it",
            piece.range(),
            whole.range()
        ),
    ))
}

/// Whether two spans share a byte.
pub(crate) fn overlap<B: Backend>(a: &Span<B>, b: &Span<B>) -> bool {
    let (x, y) = (a.range(), b.range());
    std::sync::Arc::ptr_eq(a.buffer(), b.buffer()) && x.start < y.end && y.start < x.end
}

/// Whether two spans are the same bytes.
pub(crate) fn same<B: Backend>(a: &Span<B>, b: &Span<B>) -> bool {
    std::sync::Arc::ptr_eq(a.buffer(), b.buffer()) && a.range() == b.range()
}
