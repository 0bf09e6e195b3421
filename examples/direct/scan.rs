//! A table stored row by row, of which one column is read: only the bytes that the question needs travel.

use super::ran::Ran;
use rampool::direct::{Direct, Filter, Total};
use rampool::proto::layout::Layout;
use std::error::Error;
use std::time::Instant;

const ROW_BYTES: u64 = 4096;
/// Where in a row the column lies.
const PRICE: u64 = 16;

/// Any numbers that look like prices.
fn price(row: u64) -> i64 {
    (row.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 50).cast_signed() - 4000
}

pub fn run(direct: &mut Direct, rows: u64) -> Result<Ran, Box<dyn Error>> {
    let table = direct.open_or_create("orders", rows * ROW_BYTES)?;
    let column = Layout::bytes(8)?.hvector(rows, 1, ROW_BYTES.cast_signed())?;
    let prices: Vec<i64> = (0..rows).map(price).collect();
    // Every row has its number in front and its price; the rest of it stays zero.
    let numbers: Vec<u64> = (0..rows).collect();
    direct.put_values(table, 0, &column, &numbers)?;
    direct.put_values(table, PRICE, &column, &prices)?;

    let before = bytes_received(direct);
    let started = Instant::now();
    let dear = Filter::greater(5000i64);
    let (count, total) = direct.sum(table, PRICE, &column, dear)?;
    let (took, travelled) = (started.elapsed(), bytes_received(direct) - before);
    let which = direct.select(table, PRICE, &column, dear)?;

    // The rows themselves, of which the first 24 bytes are enough.
    let heads: Vec<(u64, i64)> = which.iter().map(|row| (1, (row * ROW_BYTES).cast_signed())).collect();
    let picked = direct.start_get(table, 0, &Layout::bytes(24)?.hindexed(&heads)?)?;
    let picked = direct.wait(picked)?;
    for (row, head) in which.iter().zip(picked.chunks_exact(24)) {
        let (number, found) = (&head[..8], &head[16..]);
        if number != row.to_le_bytes() || found != price(*row).to_le_bytes() {
            return Err(format!("row {row} is another one").into());
        }
    }
    let expected: Vec<i64> = prices.iter().copied().filter(|price| *price > 5000).collect();
    let sum = expected.iter().map(|price| i128::from(*price)).sum();
    if (count, total) != (expected.len() as u64, Total::Integer(sum)) || which.len() != expected.len() {
        return Err(format!("{count} orders, {total:?}: expected were {} and {sum}", expected.len()).into());
    }
    direct.free(table);
    let says = format!(
        "{count} of {rows} orders cost more than 5000, {sum} together: {travelled} bytes of a table of {} travelled, in {took:?}",
        rows * ROW_BYTES
    );
    Ok(Ran { says, measured: vec![("rows", rows, took)] })
}

fn bytes_received(direct: &mut Direct) -> u64 {
    direct.pool().stats().servers.iter().map(|server| server.received_bytes).sum()
}
