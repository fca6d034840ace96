//! Vector and scalar arithmetic of real code objects against Rust's own numbers.

mod common;

use common::{Argument, Buffer, Random, launch, load};
use half::bf16;

const GROUP: [u32; 3] = [256, 1, 1];

fn groups(n: usize) -> [u32; 3] {
    [n.div_ceil(256) as u32, 1, 1]
}

/// Ordinary numbers, every power of two, and the special ones.
fn hard_floats(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random(seed);
    let special =
        [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MIN_POSITIVE, f32::MAX, 1e-45, 3.0, 0.1];
    let mut values: Vec<f32> = (0..count).map(|_| f32::from_bits(random.bits() as u32)).collect();
    for (index, value) in values.iter_mut().enumerate() {
        match index % 4 {
            0 => *value = random.unit() * 8.0,
            1 => *value = special[(random.bits() % special.len() as u64) as usize],
            _ => {}
        }
    }
    values
}

fn assert_same(name: &str, found: f32, expected: f32, inputs: &dyn std::fmt::Debug) {
    let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
    assert!(same, "{name}{inputs:?}: {found:e} ({:#x}), expected {expected:e} ({:#x})", found.to_bits(), expected.to_bits());
}

/// Division is a sequence of a dozen instructions (scale, reciprocal, Newton steps, fix-up) that together round correctly.
#[test]
fn division_is_correctly_rounded() {
    let Some(module) = load("arithmetic") else { return };
    let n = 20_000;
    let (a, b) = (hard_floats(1, n), hard_floats(2, n));
    let out = Buffer::unwritten::<f32>(n);
    let (buffer_a, buffer_b) = (Buffer::of(&a), Buffer::of(&b));
    let arguments = [Argument::Buffer(&out), Argument::Buffer(&buffer_a), Argument::Buffer(&buffer_b), Argument::U32(n as u32)];
    launch(&module, "divide", groups(n), GROUP, &arguments).expect("runs");
    for (i, found) in out.read::<f32>().into_iter().enumerate() {
        assert_same("divide", found, a[i] / b[i], &(a[i], b[i]));
    }
}

#[test]
fn square_roots_are_correctly_rounded() {
    let Some(module) = load("arithmetic") else { return };
    let n = 10_000;
    let a = hard_floats(3, n);
    let (out, buffer) = (Buffer::unwritten::<f32>(n), Buffer::of(&a));
    launch(
        &module,
        "square_root",
        groups(n),
        GROUP,
        &[Argument::Buffer(&out), Argument::Buffer(&buffer), Argument::U32(n as u32)],
    )
    .expect("runs");
    for (i, found) in out.read::<f32>().into_iter().enumerate() {
        assert_same("sqrt", found, a[i].sqrt(), &a[i]);
    }
}

#[test]
fn float_functions() {
    let Some(module) = load("arithmetic") else { return };
    let n = 3000;
    let mut random = Random(4);
    let a: Vec<f32> = (0..n).map(|_| random.unit() * if random.bits().is_multiple_of(2) { 1.0 } else { 40.0 }).collect();
    let (out, buffer) = (Buffer::unwritten::<f32>(13 * n), Buffer::of(&a));
    launch(&module, "functions", groups(n), GROUP, &[Argument::Buffer(&out), Argument::Buffer(&buffer), Argument::U32(n as u32)])
        .expect("runs");
    let out = out.read::<f32>();
    let close = |name: &str, found: f32, expected: f64, x: f32| {
        let error = (f64::from(found) - expected).abs() / expected.abs().max(1e-30);
        assert!(error < 4e-7, "{name}({x}): {found}, expected {expected}");
    };
    for (i, &x) in a.iter().enumerate() {
        let row = |k: usize| out[k * n + i];
        let wide = f64::from(x);
        close("exp", row(0), wide.exp(), x);
        assert!((f64::from(row(1)) - wide.abs().ln()).abs() < 1e-6, "log({x}): {}", row(1));
        close("rcp", row(2), 1.0 / wide, x);
        close("rsq", row(3), 1.0 / wide.abs().sqrt(), x);
        assert_same("fma", row(4), x.mul_add(x, -1.5), &x);
        assert_same("rint", row(5), x.round_ties_even(), &x);
        assert_same("floor", row(6), x.floor(), &x);
        assert_same("to int", row(7), x as i32 as f32, &x);
        assert_same("to unsigned", row(8), x as i32 as u32 as f32, &x);
        assert_same("clamp", row(9), x.clamp(-2.0, 3.0), &x);
        assert_same("bf16", row(10), bf16::from_f32(x).to_f32(), &x);
        assert_same("ldexp", row(11), (wide * 2f64.powi(i as i32 % 300 - 150)) as f32, &(x, i));
        assert_same("f64", row(12), (wide * 1.0000001 + 3.0) as f32, &x);
    }
}

#[test]
fn integer_functions() {
    let Some(module) = load("arithmetic") else { return };
    let n = 2000;
    let mut random = Random(5);
    let mut draw = || random.bits() >> (random.bits() % 64);
    let a: Vec<u64> = (0..n).map(|_| draw()).collect();
    let b: Vec<u64> = (0..n).map(|_| draw()).collect();
    let (out, buffer_a, buffer_b) = (Buffer::unwritten::<u64>(17 * n), Buffer::of(&a), Buffer::of(&b));
    let arguments = [Argument::Buffer(&out), Argument::Buffer(&buffer_a), Argument::Buffer(&buffer_b), Argument::U32(n as u32)];
    launch(&module, "integers", groups(n), GROUP, &arguments).expect("runs");
    let out = out.read::<u64>();
    for i in 0..n {
        let (x, y) = (a[i], b[i]);
        let (low_x, low_y) = (x as u32, y as u32);
        let expected = [
            x.wrapping_add(y),
            x.wrapping_sub(y),
            x.wrapping_mul(y),
            x << (y & 63),
            x >> (y & 63),
            (x as i64 >> (y & 63)) as u64,
            if (x as i64) < y as i64 { x } else { y },
            if x > y { 1 } else { 2 },
            u64::from(x.count_ones()),
            if low_x == 0 { 77 } else { u64::from(low_x.leading_zeros()) },
            if low_x == 0 { 77 } else { u64::from(low_x.trailing_zeros()) },
            u64::from(low_x / (low_y | 1)),
            (low_x as i32).wrapping_rem(low_y as i32 | 1) as i64 as u64,
            x / (y | 1),
            u64::from(low_x.reverse_bits()),
            (i64::from(x as i16) as u64).wrapping_add(u64::from(y as u8)),
            ((low_x as i32 >> (low_y & 31)) as i64 as u64) ^ u64::from(low_y.rotate_left(7)),
        ];
        for (row, expected) in expected.into_iter().enumerate() {
            assert_eq!(out[row * n + i], expected, "row {row} of {x:#x}, {y:#x}");
        }
    }
}

#[test]
fn packed_floats() {
    let Some(module) = load("arithmetic") else { return };
    let n = 300;
    let mut random = Random(6);
    let mut pairs = || (0..2 * n).map(|_| random.unit()).collect::<Vec<f32>>();
    let (a, b, c) = (pairs(), pairs(), pairs());
    let out = Buffer::unwritten::<f32>(8 * n);
    let (buffer_a, buffer_b, buffer_c) = (Buffer::of(&a), Buffer::of(&b), Buffer::of(&c));
    let arguments = [
        Argument::Buffer(&out),
        Argument::Buffer(&buffer_a),
        Argument::Buffer(&buffer_b),
        Argument::Buffer(&buffer_c),
        Argument::U32(n as u32),
    ];
    launch(&module, "packed", groups(n), GROUP, &arguments).expect("runs");
    let out = out.read::<f32>();
    for i in 0..2 * n {
        let other = i ^ 1;
        assert_same("fma", out[i], a[i].mul_add(b[i], c[i]), &i);
        assert_same("mul", out[2 * n + i], a[i] * b[i], &i);
        assert_same("add", out[4 * n + i], a[i] + b[other], &i);
        assert_same("fma", out[6 * n + i], a[other].mul_add(b[i], -c[i]), &i);
    }
}

#[test]
fn bytes_and_shorts() {
    let Some(module) = load("arithmetic") else { return };
    let n = 500;
    let mut random = Random(7);
    let in8: Vec<i8> = (0..n).map(|_| random.bits() as i8).collect();
    let in16: Vec<i16> = (0..n).map(|_| random.bits() as i16).collect();
    let (out8, out16) = (Buffer::unwritten::<i8>(n), Buffer::unwritten::<i16>(n));
    let (buffer8, buffer16) = (Buffer::of(&in8), Buffer::of(&in16));
    let arguments = [
        Argument::Buffer(&out8),
        Argument::Buffer(&out16),
        Argument::Buffer(&buffer8),
        Argument::Buffer(&buffer16),
        Argument::U32(n as u32),
    ];
    launch(&module, "bytes", groups(n), GROUP, &arguments).expect("runs");
    for i in 0..n {
        assert_eq!(out8.read::<i8>()[i], in8[i].wrapping_mul(3));
        assert_eq!(out16.read::<i16>()[i], in16[i].wrapping_sub(i16::from(in8[i])));
    }
}

#[test]
fn scalar_work_and_constants() {
    let Some(module) = load("arithmetic") else { return };
    let weights: Vec<i32> = (0..50).map(|k| k * k - 700).collect();
    let table = [3i64, 1, 4, 1, 5, 9, 2, 6];
    let sum = weights
        .iter()
        .enumerate()
        .fold(0i64, |sum, (k, &w)| sum.wrapping_mul(31).wrapping_add(i64::from(w) * table[(k * 5) & 7]));
    let (out, buffer) = (Buffer::unwritten::<i64>(3), Buffer::of(&weights));
    let arguments = [Argument::Buffer(&out), Argument::Buffer(&buffer), Argument::U32(50)];
    let counts = launch(&module, "uniform", [3, 1, 1], [64, 1, 1], &arguments).expect("runs");
    assert_eq!(out.read::<i64>(), [sum, sum + 1, sum + 2]);
    assert_eq!((counts.launches, counts.workgroups), (1, 3));
    assert_eq!(counts.bytes_written, 3 * 8);
}
