//! A job's spans as slices of the types that the rules take.

use std::sync::atomic::AtomicU32;

use bytemuck::{AnyBitPattern, NoUninit};

use crate::backend::{Span, Tensor};
use crate::error::{Error, Result};
use crate::format::DType;
use crate::scalar::{Elements, ElementsMut};

use super::Cpu;
use super::views::{self, Written};

/// What a job writes, to be taken once each, by the field of the job that names it.
pub(super) struct Outputs<'t, 'a> {
    pass: Pass,
    list: Vec<(&'a Span<Cpu>, &'t mut [u8])>,
}

impl<'t, 'a> Outputs<'t, 'a> {
    pub(super) fn new(pass: Pass, written: &'t mut [(&'a Span<Cpu>, Written<'a>)]) -> Self {
        let list = written.iter_mut().map(|(span, written)| (*span, written.bytes_mut())).collect();
        Self { pass, list }
    }

    pub(super) fn take(&mut self, span: &Span<Cpu>) -> Result<&'t mut [u8]> {
        let at = self.list.iter().position(|(field, _)| std::ptr::eq(*field, span));
        at.map(|at| self.list.swap_remove(at).1)
            .ok_or_else(|| self.pass.error("a span is not listed among what the job writes"))
    }

    pub(super) fn take_as<T: NoUninit + AnyBitPattern>(
        &mut self,
        span: &Span<Cpu>,
    ) -> Result<&'t mut [T]> {
        let pass = self.pass;
        bytemuck::try_cast_slice_mut(self.take(span)?).map_err(|e| pass.error(e))
    }

    pub(super) fn take_record<T: NoUninit + AnyBitPattern>(
        &mut self,
        span: &Span<Cpu>,
    ) -> Result<&'t mut T> {
        let pass = self.pass;
        self.take_as(span)?.first_mut().ok_or_else(|| pass.error("a record is missing"))
    }

    pub(super) fn take_elements(&mut self, tensor: &Tensor<Cpu>) -> Result<ElementsMut<'t>> {
        Ok(match tensor.dtype {
            DType::Bf16 => ElementsMut::Bf16(self.take_as(&tensor.span)?),
            DType::F16 => ElementsMut::F16(self.take_as(&tensor.span)?),
            DType::F32 => ElementsMut::F32(self.take_as(&tensor.span)?),
        })
    }
}

#[derive(Clone, Copy)]
pub(super) struct Pass {
    pub(super) name: &'static str,
}

/// The contract of all unsafe functions here: the caller is an operation that the order checker has
/// admitted with a read (for words: an accumulation) of the span, and the result does not outlive
/// it.
impl Pass {
    pub(super) fn error(self, problem: impl std::fmt::Display) -> Error {
        Error::Job { pass: self.name, problem: problem.to_string() }
    }

    pub(super) unsafe fn read_as<T: AnyBitPattern>(self, span: &Span<Cpu>) -> Result<&[T]> {
        // SAFETY: by the contract above.
        bytemuck::try_cast_slice(unsafe { views::read(span) }).map_err(|e| self.error(e))
    }

    pub(super) unsafe fn record<T: AnyBitPattern>(self, span: &Span<Cpu>) -> Result<&T> {
        // SAFETY: by the contract above.
        unsafe { self.read_as(span) }?.first().ok_or_else(|| self.error("a record is missing"))
    }

    pub(super) unsafe fn elements(self, tensor: &Tensor<Cpu>) -> Result<Elements<'_>> {
        // SAFETY: by the contract above.
        Ok(unsafe {
            match tensor.dtype {
                DType::Bf16 => Elements::Bf16(self.read_as(&tensor.span)?),
                DType::F16 => Elements::F16(self.read_as(&tensor.span)?),
                DType::F32 => Elements::F32(self.read_as(&tensor.span)?),
            }
        })
    }

    pub(super) unsafe fn word(self, span: &Span<Cpu>) -> Result<&AtomicU32> {
        // SAFETY: by the contract above.
        unsafe { span.buffer().word(span.range().start) }
            .ok_or_else(|| self.error("an accumulated word is not aligned"))
    }

    pub(super) unsafe fn optional_word(
        self,
        span: &Option<Span<Cpu>>,
    ) -> Result<Option<&AtomicU32>> {
        // SAFETY: by the contract above.
        span.as_ref().map(|span| unsafe { self.word(span) }).transpose()
    }
}
