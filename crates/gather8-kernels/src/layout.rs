//! What passes find in device memory besides tensors: fixed-size records, laid out once for every
//! backend. All little endian, all naturally aligned.

use bytemuck::{Pod, Zeroable};

/// The touched bit of a word in a bank: `0x8000_0000 | bits of |amax|`. A word of 0 has not been
/// touched since the last sync. One unsigned MAX carries value and touch, in a pass and across
/// ranks, and keeps NaN (canonical, 0x7fc00000) above infinity above every finite value.
pub const TOUCHED: u32 = 0x8000_0000;

/// What the update keeps of one slot of the amax table (32 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct SlotRecord {
    /// The scale that the last sync published: what the *next* version is cast with under delayed
    /// scaling, and what activations and gradients are cast with.
    pub published: f32,
    /// `1 / published`.
    pub published_inv: f32,
    /// The scale that the weight's *current* version is cast with.
    pub cast: f32,
    /// `1 / cast`.
    pub cast_inv: f32,
    /// How many syncs touched the slot; the device's own version of what the slot describes.
    pub version: u32,
    /// Where the next entry goes in the ring.
    pub position: u32,
    /// See [`slot_flags`].
    pub flags: u32,
    /// How many syncs found a non-finite amax here (input and gradient slots only).
    pub non_finite: u32,
}

/// Bits of [`SlotRecord::flags`].
pub mod slot_flags {
    /// A layer input's slot: a non-finite amax is counted and kept out.
    pub const INPUT: u32 = 1;
    /// An output gradient's slot: as inputs. Neither bit: a weight's slot, where a non-finite amax
    /// is fatal.
    pub const GRADIENT: u32 = 2;
    /// The slot's format is E5M2; else E4M3.
    pub const E5M2: u32 = 4;
    /// Delayed scaling; else the scale comes from the amax at hand.
    pub const DELAYED: u32 = 8;
    /// The next touched sync fills the whole ring with its amax and casts with the scale of it.
    pub const SEED: u32 = 16;
}

/// What stands beside float8 bytes: written by the pass that makes them (16 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct BytesRecord {
    /// What the values were multiplied with.
    pub scale: f32,
    /// The factor that decodes: value = code × scale_inv.
    pub scale_inv: f32,
    /// [`SlotRecord::version`] that the bytes belong to; 0 if there are none yet.
    pub version: u32,
    /// Zero.
    pub reserved: u32,
}

/// The last words of a bank, after one word per slot: a digest of what the rank issued and its
/// complement. After MAX they are complementary only if every rank had the same.
pub const ORDER_WORDS: u64 = 4;

/// Bytes of a bank of `slots` slots.
pub const fn bank_bytes(slots: u64) -> u64 {
    (slots + ORDER_WORDS) * 4
}

/// Bytes of the status of a table of `slots` slots: a [`StatusHeader`], then one word per slot
/// that is 1 if the last refused sync found a non-finite weight there.
pub const fn status_bytes(slots: u64) -> u64 {
    16 + slots * 4
}

/// The head of a table's status, in host memory. The update writes the slots' words first and the
/// counters last.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct StatusHeader {
    /// Updates done or refused so far.
    pub syncs: u32,
    /// Of these, refused because a weight held a NaN or an infinity.
    pub refused: u32,
    /// Of these, refused because the ranks had issued different operations.
    pub disordered: u32,
    /// Zero.
    pub reserved: u32,
}

/// One parameter group of the optimizer (64 bytes). Betas and their complements are formed in f64
/// and rounded once.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct GroupRecord {
    /// b1, for the bias correction.
    pub beta1: f64,
    /// b2, for the bias correction.
    pub beta2: f64,
    /// Learning rate.
    pub lr: f32,
    /// Weight decay: decoupled in AdamW, added to the gradient in L2 mode.
    pub weight_decay: f32,
    /// Added to the root of the second moment, after its bias correction.
    pub eps: f32,
    /// 0 AdamW, 1 Adam with L2 regularisation.
    pub mode: u32,
    /// b1 in f32.
    pub b1: f32,
    /// 1 − b1, rounded once.
    pub one_minus_b1: f32,
    /// b2 in f32.
    pub b2: f32,
    /// 1 − b2, rounded once.
    pub one_minus_b2: f32,
    /// 1 − b1^step; written by the control pass.
    pub correction1: f32,
    /// 1 − b2^step; written by the control pass.
    pub correction2: f32,
    /// Zero.
    pub reserved: [u32; 2],
}

/// The optimizer's one control record (64 bytes).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct ControlRecord {
    /// Steps done; a skipped step does not count.
    pub step: u64,
    /// Steps skipped because a gradient held a NaN or an infinity.
    pub skipped: u64,
    /// The global gradient norm of the last control pass, after the loss scale was taken out.
    pub norm: f64,
    /// In: the largest norm allowed, 0 for no clipping.
    pub max_norm: f32,
    /// In: 1 / loss scale.
    pub inverse_loss_scale: f32,
    /// Out: what every gradient is multiplied with (clipping × inverse loss scale).
    pub factor: f32,
    /// Out: 1 if this step is skipped.
    pub found_inf: u32,
    /// In: 1 to skip on found-inf (the default), 0 to let non-finite gradients through.
    pub skip_on_found_inf: u32,
    /// Zero.
    pub reserved: [u32; 5],
}

/// What the gradient-norm pass leaves for the all-reduce (SUM in f64): this rank's sum of squares,
/// and its count of non-finite elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct NormRecord {
    /// Sum of squares of the finite elements.
    pub sum_of_squares: f64,
    /// Number of non-finite elements.
    pub non_finite: f64,
}

/// Elements in one tile of the gradient-norm pass.
pub const NORM_TILE: u64 = 8192;
/// Lanes that share a tile: lane `l` takes the groups of 4 elements `l`, `l + 256`, … in order.
pub const NORM_LANES: usize = 256;
/// Lanes that add the tiles' sums: lane `l` takes the tiles `l`, `l + 1024`, … in order.
pub const NORM_FINAL_LANES: usize = 1024;

/// Tiles of a tensor in the gradient-norm pass; each leaves a [`NormRecord`].
pub const fn norm_tiles(elements: u64) -> u64 {
    elements.div_ceil(NORM_TILE)
}
