//! Whole steps as captured graphs: issued by the host once, launched as one operation from then on.

use gather8_kernels::Backend;

use crate::error::{Error, Result};
use crate::fsdp::{Fsdp, State, Traffic};
use crate::spec::UnitId;

/// What [`Fsdp::capture`] has captured.
pub struct CapturedStep<B: Backend> {
    graph: B::Graph,
    /// Whether each weight's float8 bytes were of its version when the captured calls began; they
    /// decided by it what is cast.
    fresh: Vec<bool>,
    /// By how much each weight's version grows, and that of its bytes.
    grown: Vec<(u64, u64)>,
    traffic: Traffic,
}

impl<B: Backend> CapturedStep<B> {
    /// The graph as the backend made it, for what the backend can say of it.
    pub fn graph(&self) -> &B::Graph {
        &self.graph
    }
}

/// Marks the runtime as broken unless it is forgotten: calls that were captured have changed what the
/// host knows, and the device has run none of them.
struct Unfinished<'a, B: Backend>(&'a Fsdp<B>);

impl<B: Backend> Drop for Unfinished<'_, B> {
    fn drop(&mut self) {
        self.0.lock().broken = true;
    }
}

impl<B: Backend> Fsdp<B> {
    /// Captures what `issue` issues through this runtime (and by itself on the
    /// [compute stream](Self::compute_stream), or on streams that are registered with a view), runs
    /// it once, and returns it for [`replay`](Self::replay).
    ///
    /// The calls must end where they begin, as those of a whole step do: nothing gathered, no step
    /// without its sync, no microbatch in progress, the same weights' float8 bytes out of date. Run
    /// the same calls once before, uncaptured; then they find what every later step finds.
    ///
    /// A replay runs the same kernels on the same addresses. What may change is what lies in device
    /// memory: activations, gradients that [`gradient_from`](Self::gradient_from) takes, learning
    /// rates ([`set_lr`](Self::set_lr)), the loss scale, the step count, found-inf. Calls that wait
    /// for the device ([`report`](Self::report), a view's `to_f32`) are refused inside; gradients
    /// that were given from the host would be repeated as they were.
    ///
    /// # Errors
    /// What `issue` returns; [`Error::Capture`] in a world above 1, or if the calls do not end where
    /// they begin; a failure of the device. After an error the runtime has been told of calls that the
    /// device has not run, and later calls that issue work say so: make a new one, from a checkpoint.
    pub fn capture<E: From<Error>>(
        &self,
        issue: impl FnOnce() -> Result<(), E>,
    ) -> Result<CapturedStep<B>, E> {
        self.check()?;
        if self.world > 1 {
            let problem = format!(
                "the group has {} ranks, and collectives are watched one by one: capture in a world of 1",
                self.world
            );
            return Err(Error::Capture { problem }.into());
        }
        let before = {
            let mut state = self.lock();
            self.refuse_unsettled(&mut state, "before the capture")?;
            self.join(&mut state).map_err(Error::from)?;
            (fresh(&state), versions(&state), state.traffic)
        };
        let compute = &self.streams.compute;
        let (mut unfinished, mut outcome) = (None, Ok(()));
        let captured = self.backend.capture(compute, || {
            unfinished = Some(Unfinished(self));
            self.fan_out(&mut self.lock())?;
            outcome = issue();
            self.join(&mut self.lock())
        });
        outcome?;
        let (graph, ()) = captured.map_err(Error::from)?;
        let mut state = self.lock();
        self.refuse_unsettled(&mut state, "at its end")?;
        if fresh(&state) != before.0 {
            let changed = fresh(&state).iter().zip(&before.0).position(|(now, then)| now != then);
            let name = self.name_of(changed);
            let problem = format!(
                "weight `{name}` has been cast before its first step or is not followed by one: replays \
                 would find it otherwise than this capture has; run the same calls once, then capture them"
            );
            return Err(Error::Capture { problem }.into());
        }
        let grown = versions(&state)
            .into_iter()
            .zip(before.1)
            .map(|(now, then)| (now.0 - then.0, now.1.saturating_sub(then.1)))
            .collect();
        let traffic = state.traffic.since(before.2);
        self.backend.launch(compute, &graph).map_err(Error::from)?;
        self.fan_out(&mut state).map_err(Error::from)?;
        if let Some(unfinished) = unfinished {
            std::mem::forget(unfinished);
        }
        Ok(CapturedStep { graph, fresh: before.0, grown, traffic })
    }

    /// Runs a captured step again: after everything that was issued before, and before everything
    /// that is issued after.
    ///
    /// # Errors
    /// [`Error::Capture`] if something is gathered or a step is in progress, or the weights were
    /// changed without a [`sync`](Self::sync); what an earlier operation failed with.
    pub fn replay(&self, captured: &CapturedStep<B>) -> Result<()> {
        self.check()?;
        let mut state = self.lock();
        let state = &mut *state;
        self.refuse_unsettled(state, "before a replay")?;
        let differs = fresh(state).iter().zip(&captured.fresh).position(|(now, then)| now != then);
        if differs.is_some() || captured.grown.len() != state.weights.len() {
            let problem = format!(
                "weight `{}` has been gathered or changed since the last step ended: replays follow \
                 a whole step, captured or not",
                self.name_of(differs)
            );
            return Err(Error::Capture { problem });
        }
        self.join(state)?;
        self.backend.launch(&self.streams.compute, &captured.graph)?;
        self.fan_out(state)?;
        for (weight, (version, bytes)) in state.weights.iter_mut().zip(&captured.grown) {
            weight.version += version;
            weight.bytes_version += bytes;
            weight.synced = weight.version;
        }
        state.traffic.add(captured.traffic);
        Ok(())
    }

    fn name_of(&self, weight: Option<usize>) -> &str {
        weight.and_then(|number| self.weights.get(number)).map_or("", |weight| &weight.spec.name)
    }

    /// A captured step begins and ends where nothing is under way.
    fn refuse_unsettled(&self, state: &mut State<B>, when: &str) -> Result<()> {
        let problem = if state.stepped {
            "sync() has not followed step()".to_owned()
        } else if let Some(number) = state.weights.iter().position(|w| w.version != w.synced) {
            format!("weight `{}` was changed: call sync()", self.name_of(Some(number)))
        } else if state.microbatch > 0 || state.weights.iter().any(|weight| weight.expected > 0) {
            "a step is in progress: call step() and sync()".to_owned()
        } else if let Some(number) = state.units.iter().position(|unit| unit.residence.is_some()) {
            format!("unit `{}` is gathered: reshard it", self.unit(UnitId(number))?.name)
        } else {
            return Ok(());
        };
        Err(Error::Capture { problem: format!("{when}, {problem}") })
    }

    /// Makes the compute stream wait for everything that has been issued on other streams.
    fn join(&self, state: &mut State<B>) -> gather8_kernels::Result<()> {
        for fence in state.fences() {
            self.backend.wait(&self.streams.compute, fence, "replay-after-all")?;
        }
        Ok(())
    }

    /// Makes what is issued from now on come after what the compute stream has been given: the
    /// other streams begin with a wait for an event of it, or for one of these. Earlier events are
    /// implied; those of the other side of a capture's border could not be waited for.
    fn fan_out(&self, state: &mut State<B>) -> gather8_kernels::Result<()> {
        let now = self.backend.record(&self.streams.compute)?;
        for fence in state.fences() {
            *fence = now.clone();
        }
        state.synced = Some(now);
        state.gather_waits_for_sync = true;
        Ok(())
    }
}

impl<B: Backend> State<B> {
    /// Every event that something may wait for later.
    fn fences(&mut self) -> impl Iterator<Item = &mut B::Event> {
        let units = self.units.iter_mut();
        let units = units.flat_map(|unit| unit.fences.iter_mut().chain(&mut unit.gradient_fences));
        let arenas = self.arena.fences().chain(self.gradient_arena.fences());
        let last = [&mut self.synced, &mut self.last_gather, &mut self.last_reduce];
        units.chain(arenas).chain(last.into_iter().flatten())
    }
}

fn fresh<B: Backend>(state: &State<B>) -> Vec<bool> {
    state.weights.iter().map(|weight| weight.bytes_version == weight.version).collect()
}

fn versions<B: Backend>(state: &State<B>) -> Vec<(u64, u64)> {
    state.weights.iter().map(|weight| (weight.version, weight.bytes_version)).collect()
}
