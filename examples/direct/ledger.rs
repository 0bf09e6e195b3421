//! Random updates of a large table, as in OLTP: amounts move between accounts, one element here and one
//! there, and no two transfers need the same pages in a row. Servers update the elements in place; many
//! updates are under way at once, and no page travels.

use super::ran::Ran;
use rampool::direct::{Direct, PendingValue};
use rampool::pool::PoolConfig;
use rampool::proto::elements::Combine;
use rampool::proto::layout::Layout;
use std::collections::VecDeque;
use std::error::Error;
use std::time::Instant;

/// An account's row; its balance is at the start, the number of its updates follows.
const ROW_BYTES: u64 = 128;
const OPENING: i64 = 1_000_000;

/// `clients` threads make `transfers` transfers each between `accounts` accounts, each with up to `most` of
/// its updates under way. The sum of all balances does not change, and each balance equals the result of its
/// transfers.
pub fn run(
    direct: &mut Direct,
    accounts: u64,
    clients: u64,
    transfers: u64,
    most: usize,
) -> Result<Ran, Box<dyn Error>> {
    let table = direct.open_or_create("accounts", accounts * ROW_BYTES)?;
    let balances = Layout::bytes(8)?.hvector(accounts, 1, ROW_BYTES.cast_signed())?;
    direct.put_values(table, 0, &balances, &vec![OPENING; usize::try_from(accounts)?])?;
    let lease = direct.pool().lease_ticket();
    let started = Instant::now();
    let client = |number: u64| -> Result<(), String> {
        let mut direct = Direct::connect(&PoolConfig::attach(lease.clone(), "teller"))
            .map_err(|error| error.to_string())?;
        let mut post = || -> Result<(), Box<dyn Error>> {
            let table = direct.open("accounts")?;
            let mut under_way: VecDeque<PendingValue> = VecDeque::new();
            for (from, to, amount) in orders(number, accounts, transfers) {
                for (account, change) in [(from, -amount), (to, amount)] {
                    under_way.push_back(direct.start_fetch_op(
                        table,
                        account * ROW_BYTES,
                        Combine::Sum,
                        change,
                    )?);
                    under_way.push_back(direct.start_fetch_op(
                        table,
                        account * ROW_BYTES + 8,
                        Combine::Sum,
                        1i64,
                    )?);
                }
                while under_way.len() > most {
                    let oldest = under_way.pop_front().expect("there are some");
                    direct.wait_value::<i64>(oldest)?;
                }
            }
            for update in under_way {
                direct.wait_value::<i64>(update)?;
            }
            Ok(())
        };
        let posted = post().map_err(|error| error.to_string());
        direct.close();
        posted
    };
    let done: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let client = &client;
        let threads: Vec<_> = (0..clients).map(|number| scope.spawn(move || client(number))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a client panicked".into())))
            .collect()
    });
    done.into_iter().collect::<Result<(), String>>()?;
    let took = started.elapsed();
    let mut expected = vec![(OPENING, 0); usize::try_from(accounts)?];
    for (from, to, amount) in (0..clients).flat_map(|number| orders(number, accounts, transfers)) {
        for (account, change) in [(from, -amount), (to, amount)] {
            let account = &mut expected[usize::try_from(account)?];
            *account = (account.0 + change, account.1 + 1);
        }
    }
    let found: Vec<i64> = direct.get_values(table, 0, &balances)?;
    let counts: Vec<i64> = direct.get_values(table, 8, &balances)?;
    if let Some(wrong) = (0..expected.len()).find(|n| (found[*n], counts[*n]) != expected[*n]) {
        return Err(
            format!("account {wrong} has {}: expected was {}", found[wrong], expected[wrong].0).into()
        );
    }
    direct.free(table);
    let updates = clients * transfers * 4;
    let says = format!(
        "{updates} updates of {accounts} accounts by {clients} clients in {took:?}, and every balance is \
         right"
    );
    Ok(Ran { says, measured: vec![("updates", updates, took)] })
}

/// The transfers that a client makes: from, to, how much.
fn orders(client: u64, accounts: u64, transfers: u64) -> impl Iterator<Item = (u64, u64, i64)> {
    let mut seed = client.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move |end: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 11) % end
    };
    (0..transfers).map(move |_| (next(accounts), next(accounts), i64::try_from(next(1000)).expect("small")))
}
