//! A key-value store without a server of its own: clients read entries with one get, claim free ones with one
//! compare-and-swap, and update values in place.
//!
//! An entry is 64 bytes and so lies within a page: one get reads it whole, and a reader never sees half of a
//! value that one put wrote.

use super::ran::Ran;
use rampool::direct::{Direct, DirectError, DirectRegion};
use rampool::pool::PoolConfig;
use std::error::Error;
use std::time::Instant;

const ENTRY_BYTES: u64 = 64;
/// In an entry: the key (0: free), a counter, and a value that is its length's first byte and then text.
const KEY: u64 = 0;
const COUNT: u64 = 8;
const TEXT: u64 = 16;
const TEXT_BYTES: usize = 48;

/// One client's view of the store.
pub struct Store<'a> {
    direct: &'a mut Direct,
    region: DirectRegion,
    entries: u64,
}

impl<'a> Store<'a> {
    pub fn open(direct: &'a mut Direct, entries: u64) -> Result<Self, DirectError> {
        let region = direct.open_or_create("store", entries * ENTRY_BYTES)?;
        Ok(Self { direct, region, entries })
    }

    /// Adds one to the key's counter and sets its text; the key is entered if it is new.
    pub fn put(&mut self, key: u64, text: &str) -> Result<(), Box<dyn Error>> {
        let at = self.claim(key)?;
        let mut bytes = [0; TEXT_BYTES];
        bytes[0] = u8::try_from(text.len())?;
        bytes[1..=text.len()].copy_from_slice(text.as_bytes());
        self.direct.put(self.region, at + TEXT, &bytes)?;
        self.direct.fetch_add(self.region, at + COUNT, 1u64)?;
        Ok(())
    }

    /// The key's counter and text.
    pub fn get(&mut self, key: u64) -> Result<Option<(u64, String)>, Box<dyn Error>> {
        for at in self.places(key) {
            let mut entry = [0; ENTRY_BYTES as usize];
            self.direct.get(self.region, at, &mut entry)?;
            let word = |at: u64| {
                u64::from_le_bytes(entry[at as usize..at as usize + 8].try_into().expect("eight bytes"))
            };
            if word(KEY) == 0 {
                return Ok(None);
            }
            if word(KEY) == key {
                let text = &entry[TEXT as usize..];
                return Ok(Some((word(COUNT), String::from_utf8(text[1..=usize::from(text[0])].to_vec())?)));
            }
        }
        Ok(None)
    }

    /// The entry of this key, claimed if there is none.
    fn claim(&mut self, key: u64) -> Result<u64, Box<dyn Error>> {
        for at in self.places(key) {
            // The first client gets it; all see the same.
            let before = self.direct.compare_exchange(self.region, at + KEY, 0, key)?;
            if before == 0 || before == key {
                return Ok(at);
            }
        }
        Err("the store is full".into())
    }

    /// Where the key may be, in order.
    fn places(&self, key: u64) -> impl Iterator<Item = u64> + use<> {
        let (entries, first) = (self.entries, key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20);
        (0..entries).map(move |n| (first + n) % entries * ENTRY_BYTES)
    }
}

/// `clients` threads put and get the same keys.
pub fn run(direct: &mut Direct, clients: u64, rounds: u64) -> Result<Ran, Box<dyn Error>> {
    const KEYS: u64 = 1000;
    let lease = direct.pool().lease_ticket();
    let mut store = Store::open(direct, 4 * KEYS)?;
    let client = |number: u64| -> Result<(), String> {
        let say = |error: Box<dyn Error>| error.to_string();
        let mut direct =
            Direct::connect(&PoolConfig::attach(lease.clone(), "store client")).map_err(|e| e.to_string())?;
        let mut store = Store::open(&mut direct, 4 * KEYS).map_err(|e| e.to_string())?;
        for round in 0..rounds {
            let key = 1 + (round * 7 + number) % KEYS;
            store.put(key, &format!("key {key} by {number}")).map_err(say)?;
            let (count, text) = store.get(key).map_err(say)?.ok_or("a key that was put is gone")?;
            if count == 0 || !text.starts_with(&format!("key {key} by ")) {
                return Err(format!("key {key} has {text:?}"));
            }
        }
        direct.pool().close();
        Ok(())
    };
    let started = Instant::now();
    let done: Vec<Result<(), String>> = std::thread::scope(|scope| {
        let client = &client;
        let threads: Vec<_> = (0..clients).map(|number| scope.spawn(move || client(number))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a client panicked".into())))
            .collect()
    });
    let took = started.elapsed();
    done.into_iter().collect::<Result<(), String>>()?;
    let mut updates = 0;
    for key in 1..=KEYS {
        updates += store.get(key)?.map_or(0, |(count, _)| count);
    }
    if updates != clients * rounds || store.get(KEYS + 1)?.is_some() {
        return Err(format!("{updates} updates are in the store, {} were made", clients * rounds).into());
    }
    let region = store.region;
    direct.free(region);
    let says = format!(
        "{clients} clients made {updates} updates of {KEYS} keys in {took:?}, and every one is there"
    );
    Ok(Ran { says, measured: vec![("puts and gets", 2 * updates, took)] })
}
