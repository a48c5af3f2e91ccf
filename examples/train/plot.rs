//! loss.svg: the loss curve of every run.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::launch::write_whole;
use crate::report::Output;

/// Steps that a point of a curve is the mean of; single batches differ more than the runs do.
const SMOOTHED: usize = 10;

/// Colour and width of each curve. The curves lie on one another: the ones drawn later are thinner, so
/// that all show.
const STROKES: [(RGBColor, u32); 3] =
    [(RGBColor(190, 190, 190), 7), (RGBColor(31, 119, 180), 3), (RGBColor(230, 85, 13), 1)];

/// Draws the curves of `outputs` into `folder`.
///
/// # Errors
/// A file that cannot be written.
pub(crate) fn loss_curves(folder: &Path, outputs: &[Output]) -> Result<()> {
    let svg = draw(outputs).map_err(|error| anyhow!("cannot draw the loss curves: {error}"))?;
    write_whole(&folder.join("loss.svg"), &svg)
}

/// Means over the steps up to each, at most [`SMOOTHED`] of them.
fn smooth(output: &Output) -> Vec<(f64, f64)> {
    let losses: Vec<f64> = output.records.iter().map(|record| record.loss).collect();
    let means = (1..=losses.len()).map(|end| {
        let window = losses.get(end.saturating_sub(SMOOTHED)..end).unwrap_or_default();
        (end as f64, window.iter().sum::<f64>() / window.len() as f64)
    });
    means.collect()
}

fn draw(outputs: &[Output]) -> Result<String, Box<dyn std::error::Error + '_>> {
    let curves: Vec<Vec<(f64, f64)>> = outputs.iter().map(smooth).collect();
    let points = || curves.iter().flatten();
    let steps = points().map(|&(step, _)| step).fold(1.0, f64::max);
    let lowest = points().map(|&(_, loss)| loss).fold(f64::INFINITY, f64::min);
    let highest = points().map(|&(_, loss)| loss).fold(f64::NEG_INFINITY, f64::max);
    let margin = 0.05 * (highest - lowest).max(0.1);

    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (860, 480)).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .margin(16)
            .caption("Training loss by how weights are gathered", ("sans-serif", 20))
            .x_label_area_size(44)
            .y_label_area_size(60)
            .build_cartesian_2d(0.0..steps, lowest - margin..highest + margin)?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc(format!("nats per byte, mean of {SMOOTHED} steps"))
            .x_label_formatter(&|step| format!("{step:.0}"))
            .y_label_formatter(&|loss| format!("{loss:.1}"))
            .light_line_style(WHITE)
            .label_style(("sans-serif", 14))
            .draw()?;
        for ((output, curve), (colour, width)) in outputs.iter().zip(curves).zip(STROKES) {
            let style = colour.stroke_width(width);
            chart
                .draw_series(LineSeries::new(curve, style))?
                .label(format!(
                    "{}: {:.3} over the last 20",
                    output.run.name(),
                    output.final_loss()
                ))
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .margin(14)
            .background_style(WHITE)
            .label_font(("sans-serif", 15))
            .draw()?;
        area.present()?;
    }
    Ok(svg)
}
