//! A training in which the host waits for nothing and notes every byte that a layer would see.
//!
//! What a wait on the host orders, no event needs to: so nothing here downloads, allocates or frees
//! once the first step has made its plans. Gradients are the weights themselves, which every rank
//! reads from what it has gathered: a byte that comes too early or too late changes all that follow.

use std::collections::HashMap;

use anyhow::{Context as _, ensure};
use gather8::config::{DEFAULT_GROUP, GroupConfig, MasterWeight};
use gather8::hooks::Encoding;
use gather8::{Fsdp, Phase, Scaling};
use gather8_kernels::job::Decode;
use gather8_kernels::{Backend, DType, Format, Job, Memory, Span, Tensor};

use crate::Context;
use crate::model::{Mlp, initial};

const STEPS: u64 = 10;
/// Bytes that the notes may take.
const NOTES: u64 = 256 << 10;

/// Ten steps as one rank sees them: every gathered byte and record in the order of use, and at the
/// end scales, rings, weights, masters and moments. `begin` is called between start and steps.
pub fn ten_steps<B: Backend>(
    cx: &Context<B>,
    scaling: Scaling,
    begin: impl FnOnce(),
) -> anyhow::Result<Vec<u8>> {
    let mut config = cx.config();
    config.scaling = scaling;
    let mut group = GroupConfig::default();
    group.master = MasterWeight::Remainder;
    config.optimizer.groups.insert(DEFAULT_GROUP.to_owned(), group);
    let model = Mlp::uneven();
    let fsdp = Fsdp::builder(config, cx.backend.clone(), cx.communicator.clone())
        .units(model.units())
        .input_slot("input", Format::E4m3)
        .build(|spec, rows| anyhow::Ok(initial(spec, rows)))?;
    let side = cx.backend.stream("side")?;
    let mut reader = Reader::new(&fsdp)?;
    let mut beside = Reader::new(&fsdp)?;
    begin();
    for step in 0..STEPS {
        let microbatches = if step % 5 == 3 { 2 } else { 1 };
        fsdp.begin_step(microbatches)?;
        for _ in 0..microbatches {
            for layer in 0..3 {
                for part in ["weight", "bias"] {
                    reader.read(&format!("layer{layer}.{part}"), Phase::Forward, None)?;
                }
            }
            for layer in (0..3).rev() {
                for part in ["weight", "bias"] {
                    let name = format!("layer{layer}.{part}");
                    let gradient = reader.read(&name, Phase::Backward, None)?;
                    fsdp.gradient_from(fsdp.weight_id(&name)?, &gradient)?;
                }
            }
            fsdp.finish_backward()?;
        }
        if step % 4 == 1 {
            // Read by a stream of the trainer's own, and gathered ahead for nothing.
            beside.read("layer2.weight", Phase::Inference, Some(&side))?;
            fsdp.prefetch(fsdp.unit_id("layer0")?)?;
        }
        fsdp.step()?;
        fsdp.sync()?;
    }
    let mut bytes = reader.notes(fsdp.compute_stream())?;
    bytes.extend(beside.notes(&side)?);
    for spec in fsdp.weights() {
        let id = fsdp.weight_id(&spec.name)?;
        let view = fsdp.weight(id, Phase::Inference)?;
        bytes.extend(view.to_bytes()?);
        bytes.extend(view.scale_inv()?.unwrap_or_default().to_le_bytes());
        let (exp_avg, exp_avg_sq) = fsdp.moments(id)?;
        for values in [fsdp.shard(id)?, fsdp.master(id)?, exp_avg, exp_avg_sq] {
            bytes.extend(values.into_iter().flat_map(f32::to_le_bytes));
        }
    }
    let table = fsdp.table_snapshot()?;
    for record in &table.records {
        bytes.extend(format!("{record:?}").into_bytes());
    }
    bytes.extend(table.rings.into_iter().flat_map(f32::to_le_bytes));
    fsdp.check()?;
    Ok(bytes)
}

/// Reads weights on a stream and keeps what it has read in device memory.
struct Reader<'a, B: Backend> {
    fsdp: &'a Fsdp<B>,
    /// The last weight's values.
    scratch: Span<B>,
    notes: Span<B>,
    noted: u64,
    /// By the place of bytes and record: a plan allocates.
    decodes: HashMap<String, B::Plan>,
}

impl<'a, B: Backend> Reader<'a, B> {
    fn new(fsdp: &'a Fsdp<B>) -> anyhow::Result<Self> {
        let memory = |bytes| fsdp.backend().alloc(bytes, Memory::Device);
        Ok(Self {
            fsdp,
            scratch: Span::whole(&memory(4096)?),
            notes: Span::whole(&memory(NOTES)?),
            noted: 0,
            decodes: HashMap::new(),
        })
    }

    fn note(&mut self, on: &B::Stream, bytes: &Span<B>) -> anyhow::Result<()> {
        let to = self.notes.sub(self.noted..self.noted + bytes.len())?;
        self.noted += bytes.len();
        Ok(self.fsdp.backend().copy(on, bytes, &to)?)
    }

    /// The weight's values, on the compute stream or on a stream of the trainer's own.
    fn read(
        &mut self,
        name: &str,
        phase: Phase,
        on: Option<&B::Stream>,
    ) -> anyhow::Result<Tensor<B>> {
        let fsdp = self.fsdp;
        let backend = fsdp.backend();
        let view = fsdp.weight(fsdp.weight_id(name)?, phase)?;
        if let Some(side) = on {
            view.register(side)?;
        }
        let on = on.unwrap_or_else(|| fsdp.compute_stream());
        let unsharded = view.unsharded()?;
        self.note(on, &unsharded.bytes)?;
        let Encoding::Float8 { format, record } = &unsharded.encoding else {
            let values = self.scratch.sub(0..unsharded.bytes.len())?;
            backend.copy(on, &unsharded.bytes, &values)?;
            return Ok(Tensor::new(values, DType::Bf16)?);
        };
        self.note(on, record)?;
        let values = self.scratch.sub(0..unsharded.bytes.len() * 4)?;
        let dst = Tensor::new(values, DType::F32)?;
        let key = format!("{:?} {record:?}", unsharded.bytes);
        if !self.decodes.contains_key(&key) {
            let (src, record) = (unsharded.bytes.clone(), record.clone());
            let job = Decode { src, format: *format, record, dst: dst.clone() };
            self.decodes.insert(key.clone(), backend.plan(&[Job::Decode(job)])?);
        }
        let plan = self.decodes.get(&key).context("made above")?;
        backend.run(on, plan)?;
        Ok(dst)
    }

    /// What has been read on the stream.
    fn notes(&self, on: &B::Stream) -> anyhow::Result<Vec<u8>> {
        ensure!(self.noted > 0, "nothing was read");
        let mut bytes = vec![0; self.noted as usize];
        self.fsdp.backend().download(on, &self.notes.sub(0..self.noted)?, &mut bytes)?;
        Ok(bytes)
    }
}
