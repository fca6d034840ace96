//! Products over many shapes, on the processor or a GPU: a table, a plot (`plot`), and advice about the model's own shapes.

use anyhow::Result;
use serde::Serialize;

use super::gemm::{Product, products};
use super::synthetic::{matrix, weights};
use super::timing::{self, Times};
use crate::model::ModelConfig;
use crate::recipe::Recipe;
use crate::tensor::Backend as _;
use crate::tensor::backend::Precision;
use crate::tensor::cpu::Cpu;
use crate::tensor::hip::{DeviceFacts, Hip, Operands};

/// Sizes along each of M, N and K, at most, and the factor between them.
const SIZES: usize = 4;
const STEP: usize = 4;
/// Largest size where none is given: of the processor, of a GPU, of the software GPU.
const CPU_LARGEST: usize = 2048;
const GPU_LARGEST: usize = 16_384;
const SOFTWARE_LARGEST: usize = 64;
/// Products that are smaller are left out: nothing in them would be the product's time.
const SMALLEST: usize = 16;
/// A model's shape below this part of the best rate of all is worth a word.
const SLOW: f64 = 0.5;

/// What was measured on one device.
#[derive(Debug, Clone, Serialize)]
pub struct Sweep {
    pub device: String,
    /// The device is a program that takes a GPU's place: the times say nothing about any GPU.
    pub software: bool,
    pub precision: Precision,
    pub points: Vec<Point>,
    pub advice: Vec<String>,
}

/// `y = x wᵀ` with x `[m, k]`, w `[n, k]`.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// The model's weight whose shape it is; None = one of the grid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    #[serde(flatten)]
    pub times: Times,
    pub flops: f64,
    pub gflops: f64,
    /// FLOP for each byte of operands and result, moved once.
    pub flops_per_byte: f64,
}

impl Point {
    fn new(product: &Product, named: bool, bytes_of: [f64; 2], times: Times) -> Self {
        let (m, n, k) = (product.m, product.n, product.k);
        let flops = 2.0 * m as f64 * n as f64 * k as f64;
        let [operand, result] = bytes_of;
        let bytes = operand * (m * k + n * k) as f64 + result * (m * n) as f64;
        Self {
            name: named.then(|| product.name.to_string()),
            m,
            n,
            k,
            flops,
            gflops: flops / times.median_s / 1e9,
            flops_per_byte: flops / bytes,
            times,
        }
    }
}

/// Sizes of the grid, rising.
fn sizes(largest: usize) -> Vec<usize> {
    let mut sizes: Vec<usize> =
        (0..SIZES as u32).map(|i| largest / STEP.pow(i)).filter(|size| *size >= SMALLEST.min(largest)).collect();
    sizes.reverse();
    sizes
}

/// The grid, then the model's own shapes.
fn shapes(largest: usize, recipe: Option<&Recipe>) -> Vec<(Product, bool)> {
    let sizes = sizes(largest);
    let mut all = Vec::new();
    for m in &sizes {
        for n in &sizes {
            all.extend(sizes.iter().map(|k| (Product { name: "grid", m: *m, n: *n, k: *k }, false)));
        }
    }
    let own = |model: &ModelConfig, tokens| products(model, tokens).into_iter().map(|p| (p, true));
    all.extend(recipe.iter().flat_map(|r| own(&r.model, r.train.sequences_at_once() * r.train.seq_len)));
    all
}

fn progress_line(p: &Product, named: bool) -> String {
    let name = if named { p.name } else { "of the sweep" };
    format!("product {name} ({} x {} x {})", p.m, p.n, p.k)
}

/// On the processor, in the recipe's precision (f32 without one).
pub fn on_cpu(recipe: Option<&Recipe>, largest: Option<usize>, seconds: f64, progress: &dyn Fn(&str)) -> Result<Sweep> {
    let precision = recipe.map_or(Precision::F32, |r| r.train.precision);
    let b = Cpu::with_head(precision, precision);
    let mut points = Vec::new();
    for (p, named) in shapes(largest.unwrap_or(CPU_LARGEST), recipe) {
        progress(&progress_line(&p, named));
        let (x, w) = (matrix(&b, 1, p.m, p.k)?, weights(&b, 2, p.n, p.k)?);
        let times = timing::measure(seconds, || b.linear(&x, &w).map(drop))?;
        points.push(Point::new(&p, named, [4.0, 4.0], times));
    }
    let advice = slow_shapes(&points);
    Ok(Sweep { device: crate::machine::describe().name, software: false, precision, points, advice })
}

/// On a GPU: bf16 operands, f32 results.
pub fn on_gpu(
    hip: &Hip,
    facts: &DeviceFacts,
    recipe: Option<&Recipe>,
    largest: Option<usize>,
    seconds: f64,
    progress: &dyn Fn(&str),
) -> Result<Sweep> {
    let largest = largest.unwrap_or(if facts.software { SOFTWARE_LARGEST } else { GPU_LARGEST });
    let shapes = shapes(largest, recipe);
    let most = |of: fn(&Product) -> usize| shapes.iter().map(|(p, _)| of(p)).max().unwrap_or(0);
    let numbers = most(|p| (p.m + p.n) * p.k);
    let mut operands = Operands::new(hip, &matrix(hip, 1, 1, numbers)?, most(|p| p.m * p.n))?;
    let mut points = Vec::new();
    for (p, named) in &shapes {
        progress(&progress_line(p, *named));
        let times = timing::measure_until(seconds, || operands.multiply(p.m, p.n, p.k), || hip.synchronize())?;
        points.push(Point::new(p, *named, [2.0, 4.0], times));
    }
    let mut advice: Vec<String> =
        shapes.iter().filter(|(_, named)| *named).flat_map(|(p, _)| by_rule(p, facts.compute_units)).collect();
    if !facts.software {
        advice.extend(slow_shapes(&points));
    }
    Ok(Sweep { device: facts.name.clone(), software: facts.software, precision: Precision::Bf16, points, advice })
}

/// What was measured of the model's shapes that are far from what the device does elsewhere.
fn slow_shapes(points: &[Point]) -> Vec<String> {
    let Some(best) = points.iter().max_by(|a, b| a.gflops.total_cmp(&b.gflops)) else { return Vec::new() };
    let slow = points.iter().filter(|p| p.name.is_some() && p.gflops < SLOW * best.gflops);
    let line = |p: &Point| {
        format!(
            "{}: measured {:.1} GFLOP/s, {:.0} % of the best shape here ({} x {} x {}: {:.1})",
            p.name.as_deref().unwrap_or_default(),
            p.gflops,
            100.0 * p.gflops / best.gflops,
            best.m,
            best.n,
            best.k,
            best.gflops
        )
    };
    slow.map(line).collect()
}

/// Rows and columns of a tile of the libraries' fast kernels, and of the smaller ones that they take where tiles are few.
const TILES: [usize; 2] = [256, 128];
/// Values of k that a tile goes on by.
const K_STEP: usize = 64;
/// FLOP a byte from which on an MI300X computes longer than its memory moves: 1307 TFLOP/s over 5.3 TB/s.
const BALANCE: f64 = 1307.4e12 / 5.3e12;
/// Less than this part of a device at work is worth a word.
const WELL_FILLED: f64 = 0.8;

/// Rules of thumb for products on CDNA 3, of the shape alone.
fn by_rule(p: &Product, compute_units: usize) -> Vec<String> {
    let mut out = Vec::new();
    let mut say = |text: String| out.push(format!("{} ({} x {} x {}): {text}", p.name, p.m, p.n, p.k));
    if !p.k.is_multiple_of(K_STEP) {
        say(format!(
            "k is no multiple of {K_STEP}: the last turn of the inner loop multiplies zeros, and below a multiple of 8 loads are not whole"
        ));
    }
    let tiles = |tile: usize| p.m.div_ceil(tile) * p.n.div_ceil(tile);
    // Small tiles are what libraries take where large ones leave compute units idle.
    let tile = if tiles(TILES[0]) >= compute_units { TILES[0] } else { TILES[1] };
    let used = (p.m * p.n) as f64 / (tiles(tile) * tile * tile) as f64;
    if used < WELL_FILLED {
        say(format!("tiles of {tile} x {tile} are {:.0} % full: make m and n multiples of {tile}", 100.0 * used));
    }
    let rounds = tiles(tile).div_ceil(compute_units);
    let busy = tiles(tile) as f64 / (rounds * compute_units) as f64;
    if busy < WELL_FILLED {
        say(format!(
            "{} tiles of {tile} x {tile} keep {:.0} % of {compute_units} compute units at work in {rounds} rounds: more rows a micro-batch, \
             or k cut into parts",
            tiles(tile),
            100.0 * busy
        ));
    }
    let bytes = 2.0 * (p.m * p.k + p.n * p.k) as f64 + 4.0 * (p.m * p.n) as f64;
    let intensity = 2.0 * p.m as f64 * p.n as f64 * p.k as f64 / bytes;
    if intensity < BALANCE {
        say(format!(
            "{intensity:.0} FLOP a byte, below the {BALANCE:.0} from which on an MI300X is bound by its matrix units: memory decides"
        ));
    }
    if p.name.starts_with("expert.") && p.m < TILES[0] {
        say(format!("fewer than {} rows an expert: grouped products lose to padding there; more tokens a micro-batch", TILES[0]));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_rise_to_the_largest() {
        assert_eq!(sizes(2048), [32, 128, 512, 2048]);
        assert_eq!(sizes(64), [16, 64]);
        assert_eq!(sizes(8), [8]);
        assert_eq!(shapes(64, None).len(), 8);
    }

    #[test]
    fn rules_speak_of_what_is_wrong_and_of_nothing_else() {
        let about = |m, n, k| by_rule(&Product { name: "x", m, n, k }, 304).join("\n");
        // 304 tiles of 256 x 256: all is well.
        assert_eq!(about(16 * 256, 19 * 256, 8192), "");
        assert!(about(16 * 256, 19 * 256, 8200).contains("k is no multiple of 64"));
        let few = about(1024, 256, 2048);
        assert!(few.contains("16 tiles of 128 x 128 keep 5 % of 304"), "{few}");
        assert!(about(16_384, 256, 256).contains("memory decides"));
        assert!(about(16_384, 17, 8192).contains("13 % full"));
    }

    #[test]
    fn a_point_counts_operations_and_bytes() {
        let times = Times { rounds: 3, calls_per_round: 1, median_s: 1e-3, best_s: 1e-3, cpu_s: 1e-3 };
        let point = Point::new(&Product { name: "x", m: 10, n: 20, k: 30 }, true, [2.0, 4.0], times);
        assert_eq!((point.flops, point.name.as_deref()), (12_000.0, Some("x")));
        assert!((point.gflops - 0.012).abs() < 1e-12);
        assert!((point.flops_per_byte - 12_000.0 / (2.0 * 900.0 + 4.0 * 200.0)).abs() < 1e-9);
    }
}
