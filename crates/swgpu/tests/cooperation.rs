//! Shuffles, LDS, barriers and atomics.

mod common;

use common::{Argument, Buffer, Random, launch, load};

#[test]
fn row_sums_over_four_waves() {
    let Some(module) = load("cooperation") else { return };
    let (rows, n) = (5, 777);
    let mut random = Random(1);
    // Small integers: their sums are exact in any order.
    let values: Vec<f32> = (0..rows * n).map(|_| (random.unit() * 100.0).round()).collect();
    let (out, buffer) = (Buffer::unwritten::<f32>(rows), Buffer::of(&values));
    launch(
        &module,
        "row_sums",
        [rows as u32, 1, 1],
        [256, 1, 1],
        &[Argument::Buffer(&out), Argument::Buffer(&buffer), Argument::U32(n as u32)],
    )
    .expect("runs");
    let expected: Vec<f32> = values.chunks(n).map(|row| row.iter().sum()).collect();
    assert_eq!(out.read::<f32>(), expected);
}

#[test]
fn lanes_move_as_documented() {
    let Some(module) = load("cooperation") else { return };
    let values: Vec<u32> = (0..64).map(|lane| 1000 + lane).collect();
    let (out, buffer) = (Buffer::unwritten::<u32>(11 * 64), Buffer::of(&values));
    launch(&module, "lane_moves", [1, 1, 1], [64, 1, 1], &[Argument::Buffer(&out), Argument::Buffer(&buffer)]).expect("runs");
    let out = out.read::<u32>();
    for lane in 0..64usize {
        let (row, place) = (lane / 16 * 16, lane % 16);
        let from = |lane: usize| values[lane];
        let expected = [
            from(lane ^ 1),
            from(lane ^ 1),
            if place >= 1 { from(lane - 1) } else { 7 },
            if place < 14 { from(lane + 2) } else { 0 },
            from(row + 15 - place),
            // Rows 1 and 3 take the last lane of the row before them.
            if row == 16 || row == 48 { from(row - 1) } else { 7 },
            from(17),
            from(0),
            from((lane + 61) % 64),
            from(row + (place + 13) % 16),
            from(lane ^ 1),
        ];
        for (move_, expected) in expected.into_iter().enumerate() {
            assert_eq!(out[move_ * 64 + lane], expected, "move {move_}, lane {lane}");
        }
    }
}

#[test]
fn transpose_through_lds() {
    let Some(module) = load("cooperation") else { return };
    let values: Vec<f32> = (0..4096).map(|i| i as f32).collect();
    let (out, buffer) = (Buffer::unwritten::<f32>(4096), Buffer::of(&values));
    let counts =
        launch(&module, "transpose", [1, 1, 1], [256, 1, 1], &[Argument::Buffer(&out), Argument::Buffer(&buffer)]).expect("runs");
    for (place, found) in out.read::<f32>().into_iter().enumerate() {
        assert_eq!(found, values[place % 64 * 64 + place / 64]);
    }
    assert_eq!((counts.bytes_written, counts.lds_bytes_read, counts.lds_bytes_written), (16384, 16384, 16384));
}

#[test]
fn atomics_sum_and_count() {
    let Some(module) = load("cooperation") else { return };
    let n = 1000;
    let mut random = Random(2);
    let values: Vec<i32> = (0..n).map(|_| random.bits() as i32 % 1000).collect();
    let (counts, sums, maxima) = (Buffer::of(&[0u32; 16]), Buffer::of(&[0f32; 16]), Buffer::of(&[i32::MIN; 16]));
    let buffer = Buffer::of(&values);
    let arguments = [
        Argument::Buffer(&counts),
        Argument::Buffer(&sums),
        Argument::Buffer(&maxima),
        Argument::Buffer(&buffer),
        Argument::U32(n as u32),
    ];
    launch(&module, "histogram", [4, 1, 1], [256, 1, 1], &arguments).expect("runs");
    let (counts, sums, maxima) = (counts.read::<u32>(), sums.read::<f32>(), maxima.read::<i32>());
    for bin in 0..16 {
        let members: Vec<i32> = values.iter().copied().filter(|value| value & 15 == bin).collect();
        assert_eq!(counts[bin as usize], members.len() as u32);
        assert_eq!(sums[bin as usize], members.iter().sum::<i32>() as f32 * 0.5);
        assert_eq!(maxima[bin as usize], members.into_iter().max().expect("no bin is empty"));
    }
}

#[test]
fn tickets_are_all_different() {
    let Some(module) = load("cooperation") else { return };
    let (old, counter) = (Buffer::unwritten::<u32>(512), Buffer::of(&[5u32]));
    launch(&module, "tickets", [2, 1, 1], [256, 1, 1], &[Argument::Buffer(&old), Argument::Buffer(&counter)]).expect("runs");
    let mut old = old.read::<u32>();
    old.sort_unstable();
    assert_eq!(old, (5..517).collect::<Vec<u32>>());
}

#[test]
fn three_dimensions() {
    let Some(module) = load("cooperation") else { return };
    let out = Buffer::unwritten::<u32>(4 * 6 * 6);
    launch(&module, "indices", [2, 3, 2], [2, 2, 3], &[Argument::Buffer(&out)]).expect("runs");
    for (place, found) in out.read::<u32>().into_iter().enumerate() {
        let (x, y, z) = (place % 4, place / 4 % 6, place / 24);
        assert_eq!(found as usize, x + 100 * y + 10000 * z);
    }
}
