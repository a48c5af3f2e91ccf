//! A fixed number of slots with stable addresses that units are gathered into, and the same for
//! full gradients.

use std::sync::Arc;

use gather8_kernels::{Backend, Memory};

use crate::error::{Error, Result};

/// Where a slot's users left off: the next user waits for these.
pub(crate) type Fences<B> = Vec<<B as Backend>::Event>;

/// The slots that units share. Held units have slots of their own, elsewhere.
pub(crate) struct Arena<B: Backend> {
    slots: Vec<Slot<B>>,
    kind: Kind,
}

/// What lies in an arena's slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Gathered units.
    Gathered,
    /// Full gradients until they are reduced.
    Gradients,
}

struct Slot<B: Backend> {
    buffer: Arc<B::Buffer>,
    /// Name of the unit that has it.
    holder: Option<String>,
    fences: Fences<B>,
}

/// A slot, taken: its number, and what to wait for before writing.
pub(crate) struct Taken<B: Backend> {
    pub(crate) number: usize,
    pub(crate) fences: Fences<B>,
}

impl<B: Backend> Arena<B> {
    /// `slots` buffers of `bytes` bytes each.
    pub(crate) fn new(backend: &B, kind: Kind, slots: u32, bytes: u64) -> Result<Self> {
        let slots = (0..slots)
            .map(|_| {
                Ok(Slot {
                    buffer: backend.alloc(bytes, Memory::Device)?,
                    holder: None,
                    fences: Vec::new(),
                })
            })
            .collect::<Result<_>>()?;
        Ok(Self { slots, kind })
    }

    pub(crate) fn free(&self) -> usize {
        self.slots.iter().filter(|slot| slot.holder.is_none()).count()
    }

    /// Takes the first free slot for `unit`. The choice depends on nothing but the order of calls,
    /// so that every rank makes the same.
    pub(crate) fn take(&mut self, unit: &str) -> Result<Taken<B>> {
        let free = self.slots.iter_mut().enumerate().find(|(_, slot)| slot.holder.is_none());
        if let Some((number, slot)) = free {
            slot.holder = Some(unit.to_owned());
            return Ok(Taken { number, fences: std::mem::take(&mut slot.fences) });
        }
        let holders: Vec<_> = self
            .slots
            .iter()
            .filter_map(|slot| slot.holder.as_deref())
            .map(|name| format!("`{name}`"))
            .collect();
        let (unit, holders) = (unit.to_owned(), holders.join(", "));
        Err(match self.kind {
            Kind::Gathered => Error::ArenaExhausted { unit, holders },
            Kind::Gradients => Error::GradientSlotsExhausted { unit, holders },
        })
    }

    /// Gives a slot back; the next to take it waits for `fences`.
    pub(crate) fn give_back(&mut self, number: usize, fences: Fences<B>) {
        if let Some(slot) = self.slots.get_mut(number) {
            slot.holder = None;
            slot.fences = fences;
        }
    }

    pub(crate) fn fences(&mut self) -> impl Iterator<Item = &mut B::Event> {
        self.slots.iter_mut().flat_map(|slot| slot.fences.iter_mut())
    }

    pub(crate) fn buffers(&self) -> impl Iterator<Item = &Arc<B::Buffer>> {
        self.slots.iter().map(|slot| &slot.buffer)
    }
}
