//! Rows of a GPU, on one process.

use anyhow::Result;
use gather8_collectives::Launch;
use gather8_examples::bench::cuda::{EventClock, gpu, launches};
use gather8_examples::bench::device::Device;
use gather8_examples::bench::gather::host_of_unshard;
use gather8_examples::bench::model::{Arena, Model, blocks, mixed, room};
use gather8_examples::bench::step::whole_steps;
use gather8_examples::bench::{self, Machine, Measured, Settings};
use gather8_examples::seat::Seat;

use crate::{Arguments, Results, head, say, selection};

const SINGLES: usize = 20_000;

pub(crate) fn rows(arguments: &Arguments, launch: &Launch, machine: &Machine) -> Result<Results> {
    let seat = Seat::cuda(launch, arguments.share_gpu)?;
    let cuda = seat.backend.clone();
    let device = Device::new(cuda.clone(), EventClock::new(&cuda)?)?;
    let large = blocks(arguments.divide);
    let total = large.iter().sum();
    let sizes = [large, mixed(total, 560), vec![1; SINGLES]];
    let most = sizes.iter().map(|lengths| room(lengths)).max().unwrap_or(0);
    let arena = Arena::new(&device, most)?;
    let [large, various, singles] = &sizes;
    let (large, various) = (Model::new(&arena, large)?, Model::new(&arena, various)?);
    let singles = Model::new(&arena, singles)?;
    let groups = [large.group("cuda-28"), various.group("cuda-560"), singles.group("cuda-20000")];
    let selection = selection(arguments, &[], &groups);
    let settings = Settings { size: most * 8, repeats: arguments.repeats.unwrap_or(15) };
    let gpu = gpu(&cuda, 1)?;
    head(machine);
    say(&gpu);
    say(&Measured::head());
    let rows = bench::run(&groups, &selection, settings, |row| say(row))?;
    let mut figures = Vec::new();
    for (model, tensors) in [(&large, "28"), (&various, "560")] {
        figures.extend(launches(&cuda, model, tensors)?);
    }
    drop((groups, large, various, singles, arena));
    figures.extend(host_of_unshard(&cuda, &seat.communicator, arguments.divide, 101)?);
    let clock = EventClock::new(&cuda)?;
    figures.extend(whole_steps(&cuda, &seat.communicator, &*clock, arguments.divide, 9)?);
    figures.iter().for_each(|figure| say(figure));
    Ok(Results { settings, gpu: Some(gpu), rows, figures, ..Results::default() })
}
