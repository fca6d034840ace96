//! How fast the emulator is: `cargo test --release --test speed -- --ignored --nocapture`. Prints, asserts only the floor.

mod common;

use std::time::Instant;

use common::{Argument, Buffer, launch, load};

/// Wave instructions a second that any machine should reach.
const FLOOR: f64 = 1e6;

fn measure(module: &str, kernel: &str, groups: u32, outputs: usize, rounds: u32) {
    let Some(module) = load(module) else { return };
    let out = Buffer::unwritten::<f32>(outputs);
    let start = Instant::now();
    let counts =
        launch(&module, kernel, [groups, 1, 1], [64, 1, 1], &[Argument::Buffer(&out), Argument::U32(rounds)]).expect("runs");
    let rate = counts.total() as f64 / start.elapsed().as_secs_f64();
    println!("{kernel}: {:.1} M wave instructions/s ({} in all)", rate / 1e6, counts.total());
    assert!(rate > FLOOR, "{kernel}: {rate} wave instructions/s");
}

#[test]
#[ignore = "a measurement"]
fn wave_instructions_a_second() {
    measure("wrong", "arithmetic_speed", 10, 64, 20_000);
    measure("matrix", "product_speed", 10, 256, 20_000);
}

#[test]
#[ignore = "a measurement"]
fn reduction_of_rows() {
    let Some(module) = load("cooperation") else { return };
    let (rows, n) = (200usize, 4096usize);
    let (out, input) = (Buffer::unwritten::<f32>(rows), Buffer::of(&vec![1f32; rows * n]));
    let arguments = [Argument::Buffer(&out), Argument::Buffer(&input), Argument::U32(n as u32)];
    let start = Instant::now();
    let counts = launch(&module, "row_sums", [rows as u32, 1, 1], [256, 1, 1], &arguments).expect("runs");
    let seconds = start.elapsed().as_secs_f64();
    let (rate, bandwidth) = (counts.total() as f64 / seconds / 1e6, counts.bytes_read as f64 / seconds / 1e6);
    println!("row_sums: {rate:.1} M wave instructions/s, {bandwidth:.0} MB/s read");
}
