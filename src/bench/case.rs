//! One kernel at a given shape, `linear_ce:tokens=4096,dim=256,vocab=32768`: for comparison with other programs.

use std::fmt;
use std::str::FromStr;

use anyhow::Result;

use super::report::{CaseLine, Pass};
use super::synthetic::{batch, matrix, weights};
use super::timing::{self, Times};
use crate::error::{bad_input, did_you_mean};
use crate::machine;
use crate::tensor::Backend;
use crate::tensor::backend::{AttentionShape, MuonItem, MuonStep, Precision, Qkv};
use crate::tensor::cpu::Cpu;
use crate::tensor::work::{self, Work};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Linear map, cross-entropy and both gradients.
    LinearCe { tokens: usize, dim: usize, vocab: usize },
    /// Causal attention, forward and backward.
    Attention { batch: usize, seq: usize, heads: usize, kv_heads: usize, head_dim: usize },
    /// `y = x wᵀ`: x `[m, k]`, w `[n, k]`.
    Gemm { m: usize, n: usize, k: usize },
    /// One update of `count` matrices.
    Muon { count: usize, rows: usize, cols: usize },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    pub kernel: Kernel,
    pub precision: Precision,
}

/// Kinds of cases with their parameters, all of which must be given.
const KINDS: [(&str, &[&str]); 4] = [
    ("linear_ce", &["tokens", "dim", "vocab"]),
    ("attention", &["batch", "seq", "heads", "kv_heads", "head_dim"]),
    ("gemm", &["m", "n", "k"]),
    ("muon", &["count", "rows", "cols"]),
];
/// Largest value of a parameter.
const MOST: usize = i32::MAX as usize;
/// Newton-Schulz iterations of a Muon case.
const NS_STEPS: usize = 5;

impl Kernel {
    fn kind(&self) -> &'static str {
        match self {
            Self::LinearCe { .. } => "linear_ce",
            Self::Attention { .. } => "attention",
            Self::Gemm { .. } => "gemm",
            Self::Muon { .. } => "muon",
        }
    }

    /// In the order of [`KINDS`].
    fn parameters(&self) -> Vec<usize> {
        match *self {
            Self::LinearCe { tokens, dim, vocab } => vec![tokens, dim, vocab],
            Self::Attention { batch, seq, heads, kv_heads, head_dim } => vec![batch, seq, heads, kv_heads, head_dim],
            Self::Gemm { m, n, k } => vec![m, n, k],
            Self::Muon { count, rows, cols } => vec![count, rows, cols],
        }
    }

    /// Numbers that the case holds at least, all of them f32.
    fn numbers(&self) -> f64 {
        let area = |a: usize, b: usize| a as f64 * b as f64;
        match *self {
            Self::LinearCe { tokens, dim, vocab } => 2.0 * area(tokens, dim) + 2.0 * area(vocab, dim),
            Self::Attention { batch, seq, heads, kv_heads, head_dim } => {
                area(batch, seq) * (4.0 * area(heads, head_dim) + 4.0 * area(kv_heads, head_dim))
            }
            Self::Gemm { m, n, k } => area(m, k) + area(n, k) + area(m, n),
            Self::Muon { count, rows, cols } => 3.0 * count as f64 * area(rows, cols),
        }
    }
}

/// As it is given on the command line, every parameter spelled out.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kernel.kind();
        write!(f, "{kind}:")?;
        let names = KINDS.iter().find(|(k, _)| *k == kind).map_or(&[][..], |(_, names)| names);
        for (name, value) in names.iter().zip(self.kernel.parameters()) {
            write!(f, "{name}={value},")?;
        }
        write!(f, "precision={}", name_of(self.precision))
    }
}

fn name_of(precision: Precision) -> &'static str {
    match precision {
        Precision::F32 => "f32",
        Precision::Bf16 => "bf16",
    }
}

impl FromStr for Case {
    type Err = String;

    /// The error says what is wrong and what a case looks like.
    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
        let Some((_, names)) = KINDS.iter().find(|(k, _)| *k == kind) else {
            let hint = did_you_mean(kind, KINDS.iter().map(|(k, _)| *k));
            let kinds: Vec<&str> = KINDS.iter().map(|(k, _)| *k).collect();
            return Err(format!("there is no case `{kind}`{hint}; expected one of {}", kinds.join(", ")));
        };
        let example: Vec<String> = names.iter().map(|n| format!("{n}=N")).collect();
        let refuse = |why: String| format!("{why}; expected {kind}:{}[,precision=f32|bf16]", example.join(","));
        let mut values = vec![None; names.len()];
        let mut precision = None;
        for part in rest.split(',').filter(|p| !p.is_empty()) {
            let Some((name, value)) = part.split_once('=') else {
                return Err(refuse(format!("`{part}` has no `=`")));
            };
            let twice = || refuse(format!("`{name}` is given twice"));
            if name == "precision" {
                let read = match value {
                    "f32" => Precision::F32,
                    "bf16" => Precision::Bf16,
                    other => return Err(refuse(format!("precision `{other}` is neither f32 nor bf16"))),
                };
                if precision.replace(read).is_some() {
                    return Err(twice());
                }
                continue;
            }
            let Some(slot) = names.iter().position(|n| *n == name) else {
                let hint = did_you_mean(name, names.iter().copied());
                return Err(refuse(format!("{kind} has no parameter `{name}`{hint}")));
            };
            let Some(number) = value.parse().ok().filter(|n| (1..=MOST).contains(n)) else {
                return Err(refuse(format!("`{name}={value}` is no whole number from 1 to {MOST}")));
            };
            if values[slot].replace(number).is_some() {
                return Err(twice());
            }
        }
        let missing: Vec<&str> = names.iter().zip(&values).filter(|(_, v)| v.is_none()).map(|(n, _)| *n).collect();
        let given: Vec<usize> = values.into_iter().flatten().collect();
        let kernel = match (kind, given.as_slice()) {
            ("linear_ce", &[tokens, dim, vocab]) => Kernel::LinearCe { tokens, dim, vocab },
            ("attention", &[batch, seq, heads, kv_heads, head_dim]) => {
                if !heads.is_multiple_of(kv_heads) {
                    return Err(refuse(format!("heads ({heads}) must be a multiple of kv_heads ({kv_heads})")));
                }
                Kernel::Attention { batch, seq, heads, kv_heads, head_dim }
            }
            ("gemm", &[m, n, k]) => Kernel::Gemm { m, n, k },
            ("muon", &[count, rows, cols]) => Kernel::Muon { count, rows, cols },
            _ => return Err(refuse(format!("{} is missing", missing.join(", ")))),
        };
        Ok(Self { kernel, precision: precision.unwrap_or_default() })
    }
}

impl Case {
    pub fn measure(&self, seconds: f64) -> Result<CaseLine> {
        let needed = 4.0 * self.kernel.numbers();
        if let Some(free) = machine::available_memory().filter(|free| needed > *free as f64) {
            let gib = |bytes: f64| bytes / (1u64 << 30) as f64;
            return Err(bad_input(format!(
                "cannot measure {self}: its operands alone take {:.1} GiB, and this machine has {:.1} GiB free; choose smaller numbers",
                gib(needed),
                gib(free as f64)
            )));
        }
        let (pass, times, work) = time(&Cpu::with_head(self.precision, self.precision), self.kernel, seconds)?;
        Ok(CaseLine {
            case: self.to_string(),
            kind: self.kernel.kind(),
            pass,
            precision: self.precision,
            times,
            flops: work.flops,
            gflops: work.flops / times.median_s / 1e9,
        })
    }
}

fn time<B: Backend>(b: &B, kernel: Kernel, seconds: f64) -> Result<(Pass, Times, Work)> {
    Ok(match kernel {
        Kernel::LinearCe { tokens, dim, vocab } => {
            let rows = b.rows(&batch(1, vocab, 1, tokens))?;
            let (y, head, mut d_head) = (matrix(b, 2, tokens, dim)?, weights(b, 3, vocab, dim)?, b.zeros(vocab, dim)?);
            let scale = 1.0 / tokens as f32;
            let call = || b.cross_entropy_backward(&rows, &y, &head, scale, &mut d_head).map(drop);
            (Pass::ForwardBackward, timing::measure(seconds, call)?, work::cross_entropy_backward(tokens, dim, vocab))
        }
        Kernel::Attention { batch: sequences, seq, heads, kv_heads, head_dim } => {
            let shape = AttentionShape { num_query_heads: heads, num_kv_heads: kv_heads, head_dim, window: None };
            let (t, q, kv) = (sequences * seq, heads * head_dim, kv_heads * head_dim);
            let rows = b.rows(&batch(1, 2, sequences, seq))?;
            let x = Qkv { q: matrix(b, 2, t, q)?, k: matrix(b, 3, t, kv)?, v: matrix(b, 4, t, kv)? };
            let d_out = matrix(b, 5, t, q)?;
            let call = || {
                let (out, saved) = b.causal_attention(&rows, shape, x.as_ref())?;
                b.causal_attention_backward(&rows, shape, x.as_ref(), &out, &saved, &d_out).map(drop)
            };
            let work = work::causal_attention(sequences, seq, &shape) + work::causal_attention_backward(sequences, seq, &shape);
            (Pass::ForwardBackward, timing::measure(seconds, call)?, work)
        }
        Kernel::Gemm { m, n, k } => {
            let (x, w) = (matrix(b, 1, m, k)?, weights(b, 2, n, k)?);
            (Pass::Forward, timing::measure(seconds, || b.linear(&x, &w).map(drop))?, work::linear(m, k, n))
        }
        Kernel::Muon { count, rows, cols } => {
            let one = |i: usize| {
                let stream = 2 * i as u64;
                Ok((weights(b, stream, rows, cols)?, matrix(b, stream + 1, rows, cols)?, b.zeros(rows, cols)?))
            };
            let mut held = (0..count).map(one).collect::<Result<Vec<_>>>()?;
            let step = MuonStep { lr: 1e-3, weight_decay: 0.1, momentum: 0.95, ns_steps: NS_STEPS, grad_scale: 1.0 };
            let call = || {
                let items = held.iter_mut();
                let mut items: Vec<_> =
                    items.map(|(weight, grad, momentum)| MuonItem { weight, grad, momentum, row_blocks: 1 }).collect();
                b.muon(&mut items, step)
            };
            (Pass::Update, timing::measure(seconds, call)?, work::muon(rows, cols, 1, NS_STEPS) * count as f64)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_what_it_prints() {
        for text in [
            "linear_ce:tokens=4096,dim=256,vocab=32768,precision=f32",
            "attention:batch=4,seq=1024,heads=8,kv_heads=2,head_dim=64,precision=bf16",
            "gemm:m=1,n=2,k=3,precision=f32",
            "muon:count=64,rows=512,cols=256,precision=bf16",
        ] {
            assert_eq!(text.parse::<Case>().unwrap().to_string(), text);
        }
        let case: Case = "gemm:k=3,m=1,n=2".parse().unwrap();
        assert_eq!(case, Case { kernel: Kernel::Gemm { m: 1, n: 2, k: 3 }, precision: Precision::F32 });
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, piece) in [
            ("gem:m=1,n=2,k=3", "did you mean `gemm`"),
            ("gemm", "m, n, k is missing"),
            ("gemm:m=1,k=3", "n is missing; expected gemm:m=N,n=N,k=N"),
            ("gemm:m=1,n=2,k=x", "`k=x` is no whole number"),
            ("gemm:m=0,n=2,k=3", "`m=0` is no whole number"),
            ("gemm:m=1,m=1,n=2,k=3", "`m` is given twice"),
            ("gemm:m=1,n=2,k=3,precision=f16", "neither f32 nor bf16"),
            ("muon:count=1,row=2,cols=3", "did you mean `rows`"),
            ("attention:batch=1,seq=4,heads=3,kv_heads=2,head_dim=4", "multiple of kv_heads"),
            ("linear_ce:tokens", "`tokens` has no `=`"),
        ] {
            let error = text.parse::<Case>().unwrap_err();
            assert!(error.contains(piece), "{text}: {error}");
        }
    }
}
