//! A halo exchange: a periodic lattice of four dimensions, cut in two along the first, with ghost cells
//! around each half. Each of two workers fetches the faces that its half's ghost cells are copies of, and
//! puts them there: 8 faces, none packed by hand, in both precisions.

use super::ran::Ran;
use rampool::direct::{Direct, DirectError, DirectRegion, Number};
use rampool::pool::PoolConfig;
use rampool::proto::layout::{Layout, LayoutError, Order};
use std::error::Error;
use std::time::{Duration, Instant};

const WORKERS: u64 = 2;

/// One worker's part of a lattice, ghost cells included.
struct Part {
    /// Cells in each dimension, without ghost cells.
    inner: [u64; 4],
    element: Layout,
}

impl Part {
    fn new<T: Number>(side: u64) -> Result<Self, LayoutError> {
        let element = Layout::bytes(T::KIND.bytes() as u64)?;
        Ok(Self { inner: [side / WORKERS, side, side, side], element })
    }

    fn sizes(&self) -> [u64; 4] {
        self.inner.map(|cells| cells + 2)
    }

    fn bytes(&self) -> u64 {
        self.sizes().iter().product::<u64>() * self.element.size()
    }

    /// The cells without ghosts.
    fn inside(&self) -> Result<Layout, LayoutError> {
        self.element.subarray(&self.sizes(), &self.inner, &[1; 4], Order::C)
    }

    /// One layer of cells across a dimension.
    fn layer(&self, dimension: usize, at: u64) -> Result<Layout, LayoutError> {
        let (mut cells, mut starts) = (self.inner, [1; 4]);
        (cells[dimension], starts[dimension]) = (1, at);
        self.element.subarray(&self.sizes(), &cells, &starts, Order::C)
    }
}

/// The content of a cell of the whole lattice, small enough to be exact in either precision.
fn cell(side: u64, at: [u64; 4]) -> u64 {
    at.iter().fold(0, |number, at| number * side + at) % 16_000_000
}

fn exchange<T: Number + PartialEq>(
    direct: &mut Direct,
    side: u64,
    worker: u64,
    name: &str,
    from: fn(u64) -> T,
) -> Result<Duration, Box<dyn Error>> {
    let part = Part::new::<T>(side)?;
    let regions: Vec<DirectRegion> = (0..WORKERS)
        .map(|worker| direct.open_or_create(&format!("{name}-{worker}"), part.bytes()))
        .collect::<Result<_, _>>()?;
    let own = regions[worker as usize];
    let first_row = worker * part.inner[0];
    let content = |at: [u64; 4]| from(cell(side, [first_row + at[0], at[1], at[2], at[3]]));
    direct.put_values(own, 0, &part.inside()?, &each(part.inner).map(content).collect::<Vec<T>>())?;
    barrier(direct, name, 1)?;

    let started = Instant::now();
    let mut faces = Vec::new();
    for dimension in 0..4 {
        let last = part.inner[dimension];
        // Ghosts below are the neighbour's last layer, ghosts above its first. Across the cut the neighbour
        // is the other worker, elsewhere the lattice closes.
        let neighbour = if dimension == 0 { regions[((worker + 1) % WORKERS) as usize] } else { own };
        for (ghost, face) in [(0, last), (last + 1, 1)] {
            faces.push((
                part.layer(dimension, ghost)?,
                direct.start_get(neighbour, 0, &part.layer(dimension, face)?)?,
            ));
        }
    }
    let mut puts = Vec::new();
    for (ghosts, face) in faces {
        let bytes = direct.wait(face)?;
        puts.push(direct.start_put(own, 0, &ghosts, bytes)?);
    }
    for put in puts {
        direct.wait(put)?;
    }
    let took = started.elapsed();
    barrier(direct, name, 2)?;

    for dimension in 0..4 {
        for (ghost, beyond) in [(0, side - 1), (part.inner[dimension] + 1, part.inner[dimension] % side)] {
            let values = direct.get_values::<T>(own, 0, &part.layer(dimension, ghost)?)?;
            let mut cells = part.inner;
            cells[dimension] = 1;
            let want = each(cells).map(|mut at| {
                at[dimension] = beyond;
                let row = if dimension == 0 { (first_row + beyond) % side } else { first_row + at[0] };
                from(cell(side, [row, at[1], at[2], at[3]]))
            });
            if !want.eq(values) {
                return Err(format!("ghost cells of dimension {dimension} are wrong").into());
            }
        }
    }
    barrier(direct, name, 3)?;
    if worker == 0 {
        regions.into_iter().for_each(|region| direct.free(region));
    }
    Ok(took)
}

/// All positions, the last dimension the densest.
fn each(cells: [u64; 4]) -> impl Iterator<Item = [u64; 4]> {
    (0..cells.iter().product::<u64>()).map(move |number| {
        let mut rest = number;
        let mut at = [0; 4];
        for dimension in (0..4).rev() {
            at[dimension] = rest % cells[dimension];
            rest /= cells[dimension];
        }
        at
    })
}

/// Waits until every worker has arrived `times` times.
fn barrier(direct: &mut Direct, name: &str, times: u64) -> Result<(), DirectError> {
    let region = direct.open_or_create(&format!("{name}-barrier"), 8)?;
    direct.fetch_add(region, 0, 1u64)?;
    while direct.get_value::<u64>(region, 0)? < times * WORKERS {
        std::thread::yield_now();
    }
    Ok(())
}

pub fn run(direct: &mut Direct, side: u64) -> Result<Ran, Box<dyn Error>> {
    let lease = direct.pool().lease_ticket();
    let work = |worker: u64| -> Result<[Duration; 2], String> {
        let mut direct =
            Direct::connect(&PoolConfig::attach(lease.clone(), "halo worker")).map_err(|e| e.to_string())?;
        // Numbers below 2^24 are exact in both.
        let single =
            exchange(&mut direct, side, worker, "single", |n| n as f32).map_err(|e| e.to_string())?;
        let double =
            exchange(&mut direct, side, worker, "double", |n| n as f64).map_err(|e| e.to_string())?;
        direct.pool().close();
        Ok([single, double])
    };
    let times: Vec<Result<[Duration; 2], String>> = std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..WORKERS).map(|worker| scope.spawn(move || work(worker))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a worker panicked".into())))
            .collect()
    });
    let times = times.into_iter().collect::<Result<Vec<_>, _>>()?;
    // The next run counts from the start.
    for name in ["single", "double"] {
        let barrier = direct.open(&format!("{name}-barrier"))?;
        direct.free(barrier);
    }
    // As long as the slower of them.
    let took = |precision: usize| times.iter().map(|times| times[precision]).max().unwrap_or_default();
    let inner = [side / WORKERS, side, side, side];
    let ghosts = WORKERS * inner.iter().map(|cells| 2 * inner.iter().product::<u64>() / cells).sum::<u64>();
    let says = format!(
        "{WORKERS} workers exchanged the 8 faces of {side}^4 cells; single precision in {:?}, double in {:?}",
        took(0),
        took(1)
    );
    Ok(Ran {
        says,
        measured: vec![
            ("cells, single precision", ghosts, took(0)),
            ("cells, double precision", ghosts, took(1)),
        ],
    })
}
