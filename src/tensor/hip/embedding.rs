//! Token embedding and its gradient: `kernels/embedding.zk.cpp`.

use anyhow::{Result, ensure};

use super::{Buf, Hip, Rows, int};

const ITEMS: u32 = 256;
/// Rows that one workgroup sorts by itself.
const SORT_ROWS: usize = 1024;

/// `table[ids]`, f32 `[T, D]`.
pub fn forward(hip: &Hip, rows: &Rows, table: &Buf) -> Result<Buf> {
    let beyond = rows.host_ids.iter().find(|id| **id as usize >= table.rows());
    ensure!(beyond.is_none(), "token {} of a vocabulary of {}", beyond.copied().unwrap_or(0), table.rows());
    let mut y = hip.f32s(rows.tokens(), table.cols())?;
    launch!(hip, "embedding_fwd", [rows.tokens()], ITEMS; rows.ids.at(), table.at(), y.at_mut(), int(table.cols()))?;
    Ok(y)
}

/// Adds each row's gradient to its token's row of `d_table`, rows of one token in their order. Rows of token `pad` get none.
pub fn backward(hip: &Hip, rows: &Rows, dy: &Buf, pad: Option<u32>, d_table: &mut Buf) -> Result<()> {
    let (tokens, d) = (rows.tokens(), d_table.cols());
    if tokens == 0 {
        return Ok(());
    }
    let dy = hip.as_f32(dy)?;
    let padded = tokens.next_power_of_two();
    // Of u64 keys.
    let mut keys = hip.f32s(padded, 2)?;
    let pad = pad.map_or(-1, |id| id as i32);
    launch!(
        hip, "embedding_keys", [padded.div_ceil(256)], ITEMS;
        rows.ids.at(), keys.at_mut(), int(tokens), int(padded), pad,
    )?;
    let blocks = padded.div_ceil(SORT_ROWS);
    let sort_blocks = |keys: &mut Buf, from: usize, to: usize| launch!(hip, "embedding_sort_block", [blocks], ITEMS; keys.at_mut(), int(padded), int(from), int(to));
    sort_blocks(&mut keys, 2, padded.min(SORT_ROWS))?;
    let mut size = 2 * SORT_ROWS;
    while size <= padded {
        let mut distance = size / 2;
        while distance >= SORT_ROWS {
            launch!(
                hip, "embedding_sort_step", [(padded / 2).div_ceil(256)], ITEMS;
                keys.at_mut(), int(padded), int(size), int(distance),
            )?;
            distance /= 2;
        }
        sort_blocks(&mut keys, size, size)?;
        size *= 2;
    }
    launch!(
        hip, "embedding_bwd", [tokens, d.div_ceil(256)], ITEMS;
        keys.at(), dy.at(), d_table.at_mut(), int(tokens), int(d),
    )
}
