//! Products, experts, head and optimizers of the HIP backend on the software GPU, each against the CPU backend in bf16, on shapes that do
//! and do not fill tiles. With hipBLASLt's products and with our own.

use std::env;
use std::path::Path;
use std::process::Command;

use zaya::tensor::backend::*;
use zaya::tensor::cpu::Cpu;
use zaya::tensor::hip::Hip;

use crate::hip::{has_kernels, software_gpu};

/// A library is opened once a process, and where it is is told by variables: what is tested runs in a child, which finds its task here.
const TASK: &str = "ZAYA_TEST_HIP_TASK";

/// Numbers by name.
type Numbers = Vec<(&'static str, Vec<f32>)>;

/// Runs a task in a child.
fn run(task: &str, own_products: bool) {
    if !has_kernels() {
        return;
    }
    let library = software_gpu();
    let mut child = Command::new(env::current_exe().unwrap());
    let name = module_path!().split_once("::").map_or("child".into(), |(_, module)| format!("{module}::child"));
    child.args(["--exact", &name, "--nocapture", "--test-threads=1"]).env(TASK, task).env("ZAYA_HIP_LIB", &library);
    if own_products {
        // Nothing of ROCm is in these folders.
        child.env_remove("ZAYA_HIPBLASLT_LIB").env_remove("LD_LIBRARY_PATH").env("ROCM_PATH", Path::new("/nonexistent"));
    } else {
        child.env("ZAYA_HIPBLASLT_LIB", &library);
    }
    let output = child.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{task}: {}\n{text}", output.status);
    for line in text.lines().filter(|line| line.starts_with("  ")) {
        println!("{line}");
    }
}

#[test]
fn products_of_the_library() {
    run("products", false);
}

#[test]
fn products_of_our_own() {
    run("own products", true);
}

#[test]
fn experts_are_the_cpus() {
    run("experts", false);
}

#[test]
fn rows_are_the_cpus() {
    run("rows", false);
}

#[test]
fn head_is_the_cpus() {
    run("head", false);
}

#[test]
fn updates_are_the_cpus() {
    run("updates", false);
}

/// Does what a parent told it; a mere test otherwise.
#[test]
fn child() {
    let Ok(task) = env::var(TASK) else { return };
    println!();
    let (hip, cpu) = (Hip::open(0).unwrap(), Cpu::new(Precision::Bf16));
    match task.as_str() {
        "products" => {
            products(&hip, &cpu);
            assert_eq!(launches(&hip, "gemm_"), 0, "the library was to multiply");
        }
        "own products" => {
            products(&hip, &cpu);
            assert!(launches(&hip, "gemm_nt_bf16_f32") > 0 && launches(&hip, "gemm_reduce_f32") > 0, "{:?}", hip.launches());
        }
        "experts" => all_experts(&hip, &cpu),
        "rows" => rows(&hip, &cpu),
        "head" => heads(&hip, &cpu),
        "updates" => updates(&hip, &cpu),
        other => panic!("no task is called {other}"),
    }
}

fn launches(hip: &Hip, start: &str) -> u64 {
    hip.launches().iter().filter(|(name, _)| name.starts_with(start)).map(|(_, n)| n).sum()
}

/// Numbers between -1 and 1, the same each time.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.next() + 1.0) * 0.5 * n as f32) as usize % n
    }

    fn numbers(&mut self, n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * size).collect()
    }

    fn buf<B: Backend>(&mut self, b: &B, rows: usize, cols: usize, size: f32) -> B::Buf {
        b.upload(&self.numbers(rows * cols, size), rows, cols).unwrap()
    }
}

/// That the device's numbers are the processor's within `bound` of the largest, and the same at a second run.
fn check(what: &str, bound: f64, hip: impl Fn() -> Numbers, cpu: Numbers) {
    let got = hip();
    for ((name, got), (_, want)) in got.iter().zip(&cpu) {
        assert_eq!(got.len(), want.len(), "{name} of {what}");
        let largest = want.iter().fold(1e-6f64, |most, x| most.max(f64::from(x.abs())));
        let errors = got.iter().zip(want).map(|(got, want)| f64::from((got - want).abs()) / largest);
        let (at, error) = errors.enumerate().fold((0, 0.0), |most, (i, e)| if e <= most.1 { most } else { (i, e) });
        println!("  {what}: {name} {error:.2e} of {bound:.2e}");
        assert!(error <= bound, "{name} of {what}: at {at} {} instead of {}, the largest is {largest}", got[at], want[at]);
    }
    for ((name, first), (_, again)) in got.iter().zip(&hip()) {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(first) == bits(again), "{name} of {what} has other bits the second time");
    }
}

/// Rows that are taken and put elsewhere, to the bit; without the host.
fn rows(hip: &Hip, cpu: &Cpu) {
    let mut rng = Rng(7);
    for (n, cols, taken) in [(1, 4, 1), (7, 33, 12), (300, 64, 77), (5, 16, 0)] {
        let (x, new) = (rng.numbers(n * cols, 1.0), rng.numbers(taken.min(n) * cols, 1.0));
        let some: Vec<u32> = (0..taken).map(|_| rng.below(n) as u32).collect();
        // Each at most once: every third one, around.
        let places: Vec<u32> = (0..taken.min(n)).map(|i| ((i * if n % 3 == 0 { 7 } else { 3 } + 2) % n) as u32).collect();
        fn moved<B: Backend>(b: &B, (n, cols): (usize, usize), x: &[f32], new: &[f32], some: &[u32], places: &[u32]) -> Numbers {
            let x = b.upload(x, n, cols).unwrap();
            let mut into = b.upload(b.download(&x).unwrap().as_slice(), n, cols).unwrap();
            b.scatter_rows(&b.upload(new, places.len(), cols).unwrap(), places, &mut into).unwrap();
            vec![("gathered", b.download(&b.gather_rows(&x, some).unwrap()).unwrap()), ("scattered", b.download(&into).unwrap())]
        }
        let shape = (n, cols);
        let want = moved(cpu, shape, &x, &new, &some, &places);
        check(&format!("{taken} rows of {n} x {cols}"), 0.0, || moved(hip, shape, &x, &new, &some, &places), want);
    }
    let x = rng.buf(hip, 3, 4, 1.0);
    assert!(hip.gather_rows(&x, &[3]).is_err() && hip.scatter_rows(&x, &[0, 1, 3], &mut rng.buf(hip, 3, 4, 1.0)).is_err());
    assert!(launches(hip, "experts_permute_f32_f32") > 0 && launches(hip, "experts_unpermute_f32") > 0);
}

// ---------------------------------------------------------------------------------------------------------------------------- products

fn products(hip: &Hip, cpu: &Cpu) {
    // A sum of 1100 is cut.
    for (tokens, width, outs) in [(1, 8, [5, 1]), (70, 24, [17, 40]), (129, 72, [136, 8]), (1100, 16, [9, 24])] {
        let what = format!("{tokens} rows of {width} to {outs:?}");
        // Operands are rounded alike, sums are f32.
        check(&what, 2e-6, || maps(hip, tokens, width, outs), maps(cpu, tokens, width, outs));
    }
}

fn maps<B: Backend>(b: &B, tokens: usize, width: usize, outs: [usize; 2]) -> Numbers {
    let mut rng = Rng(1);
    let x = rng.buf(b, tokens, width, 1.0);
    let w = outs.map(|out| rng.buf(b, out, width, 1.0));
    let dy = outs.map(|out| rng.buf(b, tokens, out, 1.0));
    let mut dw = outs.map(|out| rng.buf(b, out, width, 1.0));
    let [w0, w1] = w.each_ref();
    let [y0, y1] = b.project(&x, [w0, w1]).unwrap();
    let [dw0, dw1] = dw.each_mut();
    let dx = b.project_backward(&x, [w0, w1], dy.each_ref(), [dw0, dw1]).unwrap();
    let alone = b.linear_backward(&x, w0, &dy[0], &mut dw[0]).unwrap();
    let outcome = [("y0", &y0), ("y1", &y1), ("dx", &dx), ("dx of one", &alone), ("dw0", &dw[0]), ("dw1", &dw[1])];
    outcome.map(|(name, x)| (name, b.download(x).unwrap())).to_vec()
}

// ----------------------------------------------------------------------------------------------------------------------------- experts

fn all_experts(hip: &Hip, cpu: &Cpu) {
    let mut rng = Rng(2);
    // All rows to one expert; one without rows; more than a chunk of the sort, more than a tile; only skipped rows; one row.
    let cases: [(Vec<u32>, usize, usize, usize); 5] = [
        (vec![1; 70], 2, 24, 16),
        ([vec![0; 65], vec![2], vec![3; 3]].concat(), 3, 72, 40),
        ((0..300).map(|_| rng.below(4) as u32).collect(), 3, 40, 136),
        (vec![2; 5], 2, 16, 16),
        (vec![0], 1, 8, 8),
    ];
    for (routes, num, d, f) in cases {
        for skip in [SkipMode::Zero, SkipMode::Identity] {
            let what = format!("{} rows of {d}, {num} experts of {f}, skip {skip:?}", routes.len());
            // The device keeps gate, up and their gradients in bf16, the CPU in f32.
            check(&what, 2f64.powi(-6), || experts(hip, &routes, num, d, f, skip), experts(cpu, &routes, num, d, f, skip));
        }
    }
}

fn experts<B: Backend>(b: &B, routes: &[u32], num: usize, d: usize, f: usize, skip: SkipMode) -> Numbers {
    const R: usize = 8;
    let (mut rng, tokens) = (Rng(3), routes.len());
    let batch = Batch { batch: 1, seq: tokens, ids: vec![0; tokens], ..Batch::default() };
    let rows = b.rows(&batch).unwrap();
    let h = rng.buf(b, tokens, d, 1.0);
    let square = |rng: &mut Rng| rng.buf(b, R, R, 0.5);
    let vector = |rng: &mut Rng| rng.buf(b, 1, R, 0.5);
    let down = rng.buf(b, R, d, 0.5);
    let (down_bias, norm, fc1_bias, fc2_bias) = (vector(&mut rng), vector(&mut rng), vector(&mut rng), vector(&mut rng));
    let (fc1, fc2, out) = (square(&mut rng), square(&mut rng), rng.buf(b, num + 1, R, 0.5));
    let p = RouterParams {
        down_weight: &down,
        down_bias: &down_bias,
        gamma: None,
        norm: &norm,
        fc1_weight: &fc1,
        fc1_bias: &fc1_bias,
        fc2_weight: &fc2,
        fc2_bias: &fc2_bias,
        out: &out,
    };
    let (biases, pinned) = (b.zeros(1, num + 1).unwrap(), PinnedRoutes(routes.to_vec()));
    let (routing, ..) = b.route(&rows, &h, None, p, &biases, 1e-6, Some(&pinned)).unwrap();
    let mut matrices =
        |size: f32| -> Vec<B::Buf> { (0..num).flat_map(|_| [rng.buf(b, 2 * f, d, size), rng.buf(b, d, f, size)]).collect() };
    let (weights, mut gradients) = (matrices(0.3), matrices(1.0));
    let before: Vec<f32> = gradients.iter().flat_map(|g| b.download(g).unwrap()).collect();
    let dy = Rng(4).buf(b, tokens, d, 1.0);
    let (y, saved) = b.expert_ffn(&h, &routing, &weights, skip).unwrap();
    let (dh, d_prob) = b.expert_ffn_backward(&h, &routing, &weights, skip, &saved, &dy, &mut gradients).unwrap();
    let after = gradients.iter().flat_map(|g| b.download(g).unwrap());
    let added: Vec<f32> = after.zip(&before).map(|(after, before)| after - before).collect();
    assert_eq!(b.route_choices(&routing).unwrap(), routes);
    let outcome = [("y", &y), ("dh", &dh), ("d_prob", &d_prob)].map(|(name, x)| (name, b.download(x).unwrap()));
    [outcome.to_vec(), vec![("dw", added)]].concat()
}

// -------------------------------------------------------------------------------------------------------------------------------- head

fn heads(hip: &Hip, cpu: &Cpu) {
    // More rows than one chunk has; more entries than one sum has.
    for (tokens, vocab, d, unlabelled, size) in
        [(70, 1000, 40, 3, 1.0), (9, 4099, 20, 0, 20.0), (5, 50, 8, 1, 1.0), (2, 9000, 8, 0, 1.0), (4100, 12, 4, 0, 1.0)]
    {
        let what = format!("{tokens} rows of {d}, {vocab} entries");
        check(&what, 1e-5, || head(hip, tokens, vocab, d, unlabelled, size), head(cpu, tokens, vocab, d, unlabelled, size));
    }
    let rows = Batch { batch: 1, seq: 2, ids: vec![0; 2], labels: vec![1, 3], ..Batch::default() };
    let (y, table) = (Rng(5).buf(hip, 2, 4, 1.0), Rng(6).buf(hip, 3, 4, 1.0));
    let error = hip.cross_entropy(&hip.rows(&rows).unwrap(), &y, &table).unwrap_err().to_string();
    assert_eq!(error, "row 1 has label 3, but the vocabulary ends at 2");
}

/// Every `unlabelled`-th row has no label; 0 = all have one, 1 = none has.
fn head<B: Backend>(b: &B, tokens: usize, vocab: usize, d: usize, unlabelled: usize, size: f32) -> Numbers {
    let mut rng = Rng(7);
    let label =
        |i: usize, rng: &mut Rng| if unlabelled > 0 && i.is_multiple_of(unlabelled) { -1 } else { rng.below(vocab) as i64 };
    let labels = (0..tokens).map(|i| label(i, &mut rng)).collect();
    let batch = Batch { batch: 1, seq: tokens, ids: vec![0; tokens], labels, ..Batch::default() };
    let rows = b.rows(&batch).unwrap();
    let (y, table) = (rng.buf(b, tokens, d, size), rng.buf(b, vocab, d, (d as f32).powf(-0.5)));
    let before = rng.numbers(vocab * d, 0.01);
    let mut d_table = b.upload(&before, vocab, d).unwrap();
    let alone = b.cross_entropy(&rows, &y, &table).unwrap();
    let (loss, dy) = b.cross_entropy_backward(&rows, &y, &table, 0.37, &mut d_table).unwrap();
    assert_eq!(alone, loss);
    assert_eq!(loss.count, batch.num_labels());
    let mut numbers = vec![("loss", vec![loss.sum as f32]), ("dy", b.download(&dy).unwrap())];
    numbers.push(("d_head", b.download(&d_table).unwrap()));
    if tokens * vocab < 100_000 {
        numbers.push(("logits", b.download(&b.logits(&y, &table).unwrap()).unwrap()));
    }
    numbers
}

// ----------------------------------------------------------------------------------------------------------------------------- updates

fn updates(hip: &Hip, cpu: &Cpu) {
    // Newton-Schulz enlarges what the rounding of operands does: steps that round the other way here and there end some percent apart.
    check("Muon", 0.1, || muon(hip, 5), muon(cpu, 5));
    check("Muon of one step", 0.01, || muon(hip, 1), muon(cpu, 1));
    for (rows, cols, part) in [(7, 5, 0..7), (40, 32, 0..40), (1, 4099, 0..1), (7, 3, 1..4), (40, 32, 8..24)] {
        let what = format!("AdamW of rows {part:?} of {rows} x {cols}");
        check(&what, 1e-6, || adamw(hip, rows, cols, part.clone()), adamw(cpu, rows, cols, part.clone()));
    }
}

/// What a product makes of the weight: it reads the bf16 copy.
fn product<B: Backend>(b: &B, weight: &B::Buf) -> Vec<f32> {
    let [_, cols] = b.shape(weight);
    b.download(&b.linear(&Rng(8).buf(b, 3, cols, 1.0), weight).unwrap()).unwrap()
}

/// That a product sees the weight as it is, and not a copy from before an update.
fn assert_copy_is_new<B: Backend>(b: &B, weight: &B::Buf) {
    let [rows, cols] = b.shape(weight);
    let fresh = b.upload(&b.download(weight).unwrap(), rows, cols).unwrap();
    assert_eq!(product(b, weight), product(b, &fresh), "the bf16 copy of a weight of {rows} x {cols} is not the weight's");
}

fn muon<B: Backend>(b: &B, ns_steps: usize) -> Numbers {
    let mut rng = Rng(9);
    // Wide, tall, square, beyond a tile, single rows and columns, two blocks.
    let shapes = [(17, 70, 1), (129, 40, 1), (65, 65, 1), (136, 144, 1), (1, 9, 1), (9, 1, 1), (34, 24, 2)];
    let step = MuonStep { lr: 0.5, weight_decay: 0.1, momentum: 0.95, ns_steps, grad_scale: 0.5 };
    let mut weights: Vec<_> = shapes.iter().map(|(r, c, _)| rng.buf(b, *r, *c, 0.02)).collect();
    let mut momenta: Vec<_> = shapes.iter().map(|(r, c, _)| b.zeros(*r, *c).unwrap()).collect();
    // Copies are there before the first update, of all but one.
    weights.iter().skip(1).for_each(|w| drop(product(b, w)));
    for _ in 0..2 {
        let grads: Vec<_> = shapes.iter().map(|(r, c, _)| rng.buf(b, *r, *c, 1e-3)).collect();
        let state = weights.iter_mut().zip(&grads).zip(&mut momenta).zip(&shapes);
        let mut items: Vec<_> = state
            .map(|(((weight, grad), momentum), (.., row_blocks))| MuonItem { weight, grad, momentum, row_blocks: *row_blocks })
            .collect();
        b.muon(&mut items, step).unwrap();
    }
    let mut numbers = Numbers::new();
    for (weight, momentum) in weights.iter().zip(&momenta) {
        numbers.push(("weight", b.download(weight).unwrap()));
        numbers.push(("momentum", b.download(momentum).unwrap()));
        assert_copy_is_new(b, weight);
    }
    numbers
}

fn adamw<B: Backend>(b: &B, rows: usize, cols: usize, part: std::ops::Range<usize>) -> Numbers {
    let mut rng = Rng(10);
    let mut w = rng.buf(b, rows, cols, 1.0);
    // Of all rows, or of those before and behind the part, too.
    let at = usize::from(part.len() < rows);
    let (mut m, mut v) = (b.zeros(part.len() + 2 * at, cols).unwrap(), b.zeros(part.len() + 2 * at, cols).unwrap());
    drop(product(b, &w));
    for t in 1..=3 {
        let grad = rng.buf(b, rows, cols, 0.1);
        let step = AdamWStep { lr: 0.01, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, t, grad_scale: 0.25 };
        b.adamw_rows(&mut w, &grad, part.clone(), &mut m, &mut v, at, step).unwrap();
    }
    assert_copy_is_new(b, &w);
    [("weight", &w), ("m", &m), ("v", &v)].map(|(name, x)| (name, b.download(x).unwrap())).to_vec()
}
