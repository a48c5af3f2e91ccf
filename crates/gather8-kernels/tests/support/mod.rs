//! What the tests of this crate share: seeded numbers and a checksum.

#![allow(dead_code, unreachable_pub, reason = "every test file uses a part of it")]

/// CRC-32 (IEEE), eight bytes at a time, as zlib computes it.
pub struct Crc32 {
    tables: Vec<[u32; 256]>,
}

impl Crc32 {
    pub fn new() -> Self {
        let mut tables = vec![[0_u32; 256]; 8];
        for i in 0..256_u32 {
            tables[0][i as usize] = (0..8)
                .fold(i, |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 });
        }
        for i in 0..256 {
            for t in 1..8 {
                let before = tables[t - 1][i];
                tables[t][i] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            }
        }
        Self { tables }
    }

    pub fn of(&self, bytes: &[u8]) -> u32 {
        let t = &self.tables;
        let mut crc = !0_u32;
        let mut chunks = bytes.chunks_exact(8);
        for c in &mut chunks {
            let low = crc ^ u32::from_le_bytes([c[0], c[1], c[2], c[3]]);
            let [a, b, d, e] = low.to_le_bytes().map(usize::from);
            crc = t[7][a] ^ t[6][b] ^ t[5][d] ^ t[4][e];
            crc ^= t[3][c[4] as usize] ^ t[2][c[5] as usize];
            crc ^= t[1][c[6] as usize] ^ t[0][c[7] as usize];
        }
        for &byte in chunks.remainder() {
            crc = (crc >> 8) ^ t[0][((crc ^ u32::from(byte)) & 0xff) as usize];
        }
        !crc
    }
}

/// splitmix64's finaliser; `golden/make.py` has the same.
pub const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Seeded random numbers.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 += 1;
        mix(self.0)
    }

    pub fn word(&mut self) -> u32 {
        (self.bits() >> 32) as u32
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }

    /// A multiple of 2^-23 in [-1, 1).
    pub fn uniform(&mut self) -> f32 {
        unit(self.bits())
    }

    /// Any f32: one in four special, the rest of every magnitude, NaNs with payloads included.
    pub fn any_f32(&mut self) -> f32 {
        const SPECIAL: [u32; 16] = [
            0,
            1,
            0x007f_ffff,
            0x0080_0000,
            0x3f80_0000,
            0x43e0_0000,
            0x43e8_0000,
            0x43e8_0001,
            0x4760_0000,
            0x4770_0000,
            0x7f7f_ffff,
            0x7f7f_8000,
            0x7f80_0000,
            0x7f80_0001,
            0x7fc0_0000,
            0x7fff_ffff,
        ];
        let r = self.bits();
        if r & 3 == 0 {
            f32::from_bits(SPECIAL[(r >> 8) as usize % 16] | ((r as u32 & 4) << 29))
        } else {
            f32::from_bits((r >> 32) as u32)
        }
    }

    /// A finite f32 of middling size.
    pub fn ordinary(&mut self) -> f32 {
        let scale = (self.below(24) as f32 - 16.0).exp2();
        self.uniform() * scale
    }
}

/// A multiple of 2^-23 in [-1, 1) from 64 random bits.
pub fn unit(bits: u64) -> f32 {
    ((bits >> 40) as f64 / 8_388_608.0 - 1.0) as f32
}

/// The bits, with every NaN the same: for comparisons of values that are not stored.
pub fn canonical_bits(x: f32) -> u32 {
    if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() }
}
