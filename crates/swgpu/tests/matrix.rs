//! Matrix instructions against a plain triple loop.

mod common;

use common::{Argument, Buffer, Random, launch, load};
use half::bf16;
use swgpu::isa::instruction::Class;

fn random_bf16(random: &mut Random, count: usize) -> Vec<bf16> {
    (0..count).map(|_| bf16::from_f32(random.unit() * 2.0)).collect()
}

fn bits(values: &[bf16]) -> Vec<u16> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn check(kernel: &str, size: usize, depth: usize) {
    let Some(module) = load("matrix") else { return };
    let mut random = Random(size as u64);
    let a = random_bf16(&mut random, size * depth);
    let b = random_bf16(&mut random, size * depth);
    let c: Vec<f32> = (0..size * size).map(|_| random.unit()).collect();
    let d = Buffer::unwritten::<f32>(size * size);
    let (buffer_a, buffer_b, buffer_c) = (Buffer::of(&bits(&a)), Buffer::of(&bits(&b)), Buffer::of(&c));
    let arguments = [
        Argument::Buffer(&d),
        Argument::Buffer(&buffer_a),
        Argument::Buffer(&buffer_b),
        Argument::Buffer(&buffer_c),
        Argument::U32(depth as u32),
    ];
    let counts = launch(&module, kernel, [1, 1, 1], [64, 1, 1], &arguments).expect("runs");
    assert_eq!(counts.of(Class::Matrix) as usize, depth / if size == 16 { 16 } else { 8 });
    let d = d.read::<f32>();
    for row in 0..size {
        for column in 0..size {
            let exact: f64 = (0..depth).map(|k| a[row * depth + k].to_f64() * b[column * depth + k].to_f64()).sum::<f64>()
                + f64::from(c[row * size + column]);
            let found = f64::from(d[row * size + column]);
            assert!((found - exact).abs() < 1e-5, "{kernel} at ({row}, {column}): {found}, expected {exact}");
        }
    }
}

#[test]
fn bf16_tiles_of_16_rows() {
    check("tile_16x16", 16, 64);
}

#[test]
fn bf16_tiles_of_32_rows() {
    check("tile_32x32", 32, 40);
}

#[test]
fn f32_tiles_of_16_rows() {
    let Some(module) = load("matrix") else { return };
    let (depth, mut random) = (20, Random(9));
    let mut values = || (0..16 * depth).map(|_| random.unit()).collect::<Vec<f32>>();
    let (a, b) = (values(), values());
    let (d, buffer_a, buffer_b) = (Buffer::unwritten::<f32>(256), Buffer::of(&a), Buffer::of(&b));
    let arguments = [Argument::Buffer(&d), Argument::Buffer(&buffer_a), Argument::Buffer(&buffer_b), Argument::U32(depth as u32)];
    launch(&module, "tile_16x16_f32", [1, 1, 1], [64, 1, 1], &arguments).expect("runs");
    for (place, found) in d.read::<f32>().into_iter().enumerate() {
        let (row, column) = (place / 16, place % 16);
        let exact: f64 = (0..depth).map(|k| f64::from(a[row * depth + k]) * f64::from(b[column * depth + k])).sum();
        assert!((f64::from(found) - exact).abs() < 1e-5, "({row}, {column}): {found}, expected {exact}");
    }
}

/// A matrix product needs all 64 lanes.
#[test]
fn partial_wave_is_an_error() {
    let Some(module) = load("matrix") else { return };
    let (d, a) = (Buffer::unwritten::<f32>(64), Buffer::of(&[0u16; 256]));
    let fault =
        launch(&module, "tile_half_wave", [1, 1, 1], [64, 1, 1], &[Argument::Buffer(&d), Argument::Buffer(&a)]).unwrap_err();
    assert!(fault.problem.contains("all 64 lanes must be active"), "{fault}");
    assert!(fault.instruction.starts_with("v_mfma_f32_16x16x16_bf16"), "{fault}");
}
