//! Ranks as threads of this process.

use std::sync::Arc;

use gather8_collectives::LocalWorld;
use gather8_kernels::cpu::Cpu;

use crate::{Case, Context};

/// The worlds at which a case is run unless it says otherwise: powers of two and not.
pub const WORLDS: [u32; 7] = [1, 2, 3, 4, 5, 7, 8];

/// Runs `body` on every rank and returns what each returned, in rank order. A rank that panics
/// fails the test with its message.
pub fn ranks<T: Send>(world: u32, body: impl Fn(&Context<Cpu>) -> T + Send + Sync) -> Vec<T> {
    ranks_on(world, |_| Cpu::new(), body)
}

/// [`ranks`] with devices of the caller's making.
pub fn ranks_on<T: Send>(
    world: u32,
    device: impl Fn(u32) -> Cpu + Send + Sync,
    body: impl Fn(&Context<Cpu>) -> T + Send + Sync,
) -> Vec<T> {
    let group = Arc::new(LocalWorld::new(world));
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..world)
            .map(|rank| {
                let (group, body, device) = (Arc::clone(&group), &body, &device);
                scope.spawn(move || {
                    let backend = device(rank);
                    let communicator = group.rank(rank, backend.clone()).unwrap();
                    body(&Context { backend, communicator })
                })
            })
            .collect();
        let results: Vec<_> = handles.into_iter().map(|handle| handle.join()).collect();
        results
            .into_iter()
            .enumerate()
            .map(|(rank, result)| {
                result.unwrap_or_else(|panic| {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or(panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                    panic!("rank {rank} of {world}: {}", text.unwrap_or_default())
                })
            })
            .collect()
    })
}

/// Runs a case at one world; the first rank that fails is the failure.
pub fn run(world: u32, case: Case<Cpu>) {
    for (rank, result) in ranks(world, case).into_iter().enumerate() {
        if let Err(error) = result {
            panic!("rank {rank} of {world}: {error:#}");
        }
    }
}
