//! A table stored row by row, of which one column is read, and one stored column by column, of which one is
//! added up for each key in another: only the bytes that the question needs travel.

use super::ran::Ran;
use rampool::direct::{Direct, Filter, Total};
use rampool::proto::layout::Layout;
use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};

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
    let sales = 16 * rows;
    let (there, here, bytes) = for_each_key(direct, sales)?;
    let says = format!(
        "{count} of {rows} orders cost more than 5000, {sum} together: {travelled} bytes of a table of {} \
         travelled, in {took:?}; {sales} sales by {CUSTOMERS} customers: {bytes} bytes travelled, in \
         {there:?}, and {here:?} where both columns do",
        rows * ROW_BYTES
    );
    let measured = vec![
        ("rows", rows, took),
        ("sales grouped", sales, there),
        ("sales fetched and grouped", sales, here),
    ];
    Ok(Ran { says, measured })
}

const CUSTOMERS: u64 = 100;

/// Adds up what each customer paid: at the servers, and of both columns, fetched. The time of either, and the
/// bytes that the first took.
fn for_each_key(direct: &mut Direct, sales: u64) -> Result<(Duration, Duration, u64), Box<dyn Error>> {
    let (customers, prices) = (direct.create(sales * 8)?, direct.create(sales * 8)?);
    let column = Layout::bytes(8)?.contiguous(sales)?;
    let who: Vec<u64> = (0..sales).map(|sale| sale.wrapping_mul(0x9e37_79b9_7f4a_7c15) % CUSTOMERS).collect();
    direct.put_values(customers, 0, &column, &who)?;
    direct.put_values(prices, 0, &column, &(0..sales).map(price).collect::<Vec<i64>>())?;

    let before = bytes_received(direct);
    let started = Instant::now();
    let groups = direct.group::<u64, i64>((customers, 0, &column), (prices, 0, &column), Filter::all())?;
    let (there, travelled) = (started.elapsed(), bytes_received(direct) - before);

    let started = Instant::now();
    let who = direct.get_values::<u64>(customers, 0, &column)?;
    let paid = direct.get_values::<i64>(prices, 0, &column)?;
    let mut sums: BTreeMap<u64, i128> = BTreeMap::new();
    for (customer, price) in who.iter().zip(paid) {
        *sums.entry(*customer).or_default() += i128::from(price);
    }
    let here = started.elapsed();
    if !groups
        .iter()
        .map(|group| (group.key, group.sum))
        .eq(sums.into_iter().map(|(key, sum)| (key, Total::Integer(sum))))
    {
        return Err("the servers added up something else".into());
    }
    direct.free(customers);
    direct.free(prices);
    Ok((there, here, travelled))
}

fn bytes_received(direct: &mut Direct) -> u64 {
    direct.pool().stats().servers.iter().map(|server| server.received_bytes).sum()
}
