//! A small perceptron with hand-written gradients, over any holder of its weights: the runtime, or
//! plain arrays that nobody shards.

use std::collections::HashMap;

use gather8::config::GroupConfig;
use gather8::{Fsdp, Phase, UnitSpec, WeightSpec};
use gather8_kernels::{Backend, Format, scalar, scale::ScaleRule};

/// A number in [-1, 1) that depends on nothing but the name and the index.
pub fn noise(name: &str, index: u64) -> f32 {
    let mut x = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    x = x.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^= x >> 31;
    ((x >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

/// Rows of a weight's initial values.
pub fn initial(spec: &WeightSpec, rows: std::ops::Range<u64>) -> Vec<f32> {
    let scale = 1.0 / (spec.row_elements() as f32).sqrt();
    let elements = rows.start * spec.row_elements()..rows.end * spec.row_elements();
    elements.map(|index| noise(&spec.name, index) * scale).collect()
}

/// Layers of a perceptron: `dims[i]` inputs, `dims[i + 1]` outputs, ReLU between.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// Widths, from the input to the output.
    pub dims: Vec<u64>,
    /// The first layer never changes.
    pub frozen_first: bool,
}

/// Who holds the weights.
pub trait Holder {
    /// A whole weight as the layer sees it.
    fn weight(&self, name: &str, phase: Phase) -> anyhow::Result<Vec<f32>>;
    /// Its gradient.
    fn gradient(&self, name: &str, values: &[f32]) -> anyhow::Result<()>;
}

impl<B: Backend> Holder for Fsdp<B> {
    fn weight(&self, name: &str, phase: Phase) -> anyhow::Result<Vec<f32>> {
        Ok(Fsdp::weight(self, self.weight_id(name)?, phase)?.to_f32()?)
    }

    fn gradient(&self, name: &str, values: &[f32]) -> anyhow::Result<()> {
        Ok(Fsdp::gradient(self, self.weight_id(name)?, values)?)
    }
}

/// One example: inputs and targets.
pub type Example = (Vec<f32>, Vec<f32>);

impl Mlp {
    /// The default model of the cases: widths that no world divides.
    pub fn uneven() -> Self {
        Self { dims: vec![13, 10, 7, 3], frozen_first: false }
    }

    fn layers(&self) -> usize {
        self.dims.len() - 1
    }

    /// One unit a layer: a float8 matrix and a plain bias.
    pub fn units(&self) -> Vec<UnitSpec> {
        (0..self.layers())
            .map(|layer| {
                let (inputs, outputs) = (self.dims[layer], self.dims[layer + 1]);
                let mut weight =
                    WeightSpec::float8(format!("layer{layer}.weight"), [outputs, inputs]);
                let mut bias = WeightSpec::plain(format!("layer{layer}.bias"), [outputs]);
                if self.frozen_first && layer == 0 {
                    weight = weight.frozen();
                    bias = bias.frozen();
                }
                UnitSpec::new(format!("layer{layer}"), [weight, bias])
            })
            .collect()
    }

    /// Example number `index` of a fixed task.
    pub fn example(&self, index: u64) -> Example {
        let (inputs, outputs) = (self.dims[0], self.dims[self.layers()]);
        let x: Vec<_> = (0..inputs).map(|i| noise("x", index * inputs + i)).collect();
        let y = (0..outputs)
            .map(|o| {
                let dot: f32 =
                    x.iter().zip(0..).map(|(x, i)| x * noise("task", o * inputs + i)).sum();
                dot.tanh()
            })
            .collect();
        (x, y)
    }

    /// Forward and backward over a batch: the mean squared error; gradients are of the mean.
    pub fn train(&self, holder: &dyn Holder, batch: &[Example]) -> anyhow::Result<f32> {
        let layers = self.layers();
        let mut activations: Vec<Vec<Vec<f32>>> =
            vec![batch.iter().map(|(x, _)| x.clone()).collect()];
        for layer in 0..layers {
            let weight = holder.weight(&format!("layer{layer}.weight"), Phase::Forward)?;
            let bias = holder.weight(&format!("layer{layer}.bias"), Phase::Forward)?;
            let inputs = self.dims[layer] as usize;
            let next = activations[layer].iter().map(|x| {
                let outputs = bias.iter().enumerate().map(|(o, b)| {
                    let row = &weight[o * inputs..(o + 1) * inputs];
                    let sum = row.iter().zip(x).fold(*b, |sum, (w, x)| sum + w * x);
                    if layer + 1 < layers { sum.max(0.0) } else { sum }
                });
                outputs.collect()
            });
            let next = next.collect();
            activations.push(next);
        }
        let outputs = self.dims[layers] as f32;
        let scale = 1.0 / (batch.len() as f32 * outputs);
        let mut loss = 0.0;
        let mut grads: Vec<Vec<f32>> = Vec::new();
        for (output, (_, y)) in activations[layers].iter().zip(batch) {
            loss += output.iter().zip(y).map(|(o, y)| (o - y) * (o - y)).sum::<f32>() * scale;
            grads.push(output.iter().zip(y).map(|(o, y)| 2.0 * (o - y) * scale).collect());
        }
        for layer in (0..layers).rev() {
            let inputs = self.dims[layer] as usize;
            let weight = holder.weight(&format!("layer{layer}.weight"), Phase::Backward)?;
            let mut weight_grad = vec![0.0; weight.len()];
            let mut bias_grad = vec![0.0; self.dims[layer + 1] as usize];
            let mut below = Vec::new();
            for (x, grad) in activations[layer].iter().zip(&grads) {
                let mut input_grad = vec![0.0; inputs];
                for (o, g) in grad.iter().enumerate() {
                    bias_grad[o] += g;
                    for i in 0..inputs {
                        weight_grad[o * inputs + i] += g * x[i];
                        // The gradient of ReLU: the activation below is its output.
                        if layer == 0 || x[i] > 0.0 {
                            input_grad[i] += g * weight[o * inputs + i];
                        }
                    }
                }
                below.push(input_grad);
            }
            if !(self.frozen_first && layer == 0) {
                holder.gradient(&format!("layer{layer}.bias"), &bias_grad)?;
                holder.gradient(&format!("layer{layer}.weight"), &weight_grad)?;
            }
            grads = below;
        }
        Ok(loss)
    }
}

/// The model on plain arrays: nothing sharded, nothing gathered, the same float8 layers (dynamic
/// scaling) and the same optimizer, written without the runtime.
pub struct Unsharded {
    specs: HashMap<String, WeightSpec>,
    masters: HashMap<String, Vec<f32>>,
    moments: HashMap<String, (Vec<f32>, Vec<f32>)>,
    gradients: std::sync::Mutex<HashMap<String, Vec<f32>>>,
    step: i32,
}

impl Unsharded {
    /// Starts at the same values.
    pub fn new(model: &Mlp) -> Self {
        let specs: Vec<_> = model.units().into_iter().flat_map(|unit| unit.weights).collect();
        let round = |x: f32| scalar::bf16_to_f32(scalar::f32_to_bf16(x));
        let start = |spec: &WeightSpec| -> Vec<f32> {
            initial(spec, 0..spec.rows()).into_iter().map(round).collect()
        };
        Self {
            masters: specs.iter().map(|spec| (spec.name.clone(), start(spec))).collect(),
            moments: specs
                .iter()
                .map(|s| {
                    (
                        s.name.clone(),
                        (vec![0.0; s.elements() as usize], vec![0.0; s.elements() as usize]),
                    )
                })
                .collect(),
            specs: specs.into_iter().map(|spec| (spec.name.clone(), spec)).collect(),
            gradients: std::sync::Mutex::default(),
            step: 0,
        }
    }

    /// The BF16 weight, widened.
    fn rounded(&self, name: &str) -> Vec<f32> {
        self.masters[name].iter().map(|&x| scalar::bf16_to_f32(scalar::split(x).0)).collect()
    }

    /// The float8 codes of a weight and the factor that decodes them.
    pub fn bytes(&self, name: &str) -> (Vec<u8>, f32) {
        let values = self.rounded(name);
        let amax = values.iter().fold(0.0_f32, |amax, x| amax.max(x.abs()));
        let scale = ScaleRule::default().scale(Format::E4m3, amax).unwrap();
        (values.iter().map(|x| Format::E4m3.encode(x * scale)).collect(), 1.0 / scale)
    }

    /// Clips by the global norm and steps, as the default configuration says.
    pub fn step(&mut self, max_norm: f32) {
        self.step += 1;
        let gradients = std::mem::take(&mut *self.gradients.lock().unwrap());
        let norm =
            gradients.values().flatten().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
        let factor = (f64::from(max_norm) / (norm + 1e-6)).min(1.0) as f32;
        for (name, gradient) in gradients {
            let group = GroupConfig::default();
            let decay = if self.specs[&name].float8 { group.weight_decay } else { 0.0 };
            let (b1, b2) = group.betas;
            let (m, v) = self.moments.get_mut(&name).unwrap();
            let master = self.masters.get_mut(&name).unwrap();
            let (c1, c2) = ((1.0 - b1.powi(self.step)) as f32, (1.0 - b2.powi(self.step)) as f32);
            for i in 0..gradient.len() {
                let g = gradient[i] * factor;
                m[i] = b1 as f32 * m[i] + (1.0 - b1) as f32 * g;
                v[i] = b2 as f32 * v[i] + (1.0 - b2) as f32 * g * g;
                let update = (m[i] / c1) / ((v[i] / c2).sqrt() + group.eps);
                master[i] -= group.lr * (update + decay * master[i]);
            }
        }
    }
}

impl Holder for Unsharded {
    fn weight(&self, name: &str, _: Phase) -> anyhow::Result<Vec<f32>> {
        if !self.specs[name].float8 {
            return Ok(self.rounded(name));
        }
        let (codes, scale_inv) = self.bytes(name);
        Ok(codes.iter().map(|&code| Format::E4m3.decode(code) * scale_inv).collect())
    }

    fn gradient(&self, name: &str, values: &[f32]) -> anyhow::Result<()> {
        let mut gradients = self.gradients.lock().unwrap();
        let sum = gradients.entry(name.to_owned()).or_insert_with(|| vec![0.0; values.len()]);
        for (sum, value) in sum.iter_mut().zip(values) {
            *sum += value;
        }
        Ok(())
    }
}
