//! Conjugate gradients with indirect access: the matrix is a random graph, whose vector lies in the pool.
//! Each step puts the vector there and gathers, by one request, what the graph's edges lead to.

use super::ran::Ran;
use rampool::direct::Direct;
use rampool::proto::layout::Layout;
use std::error::Error;
use std::time::{Duration, Instant};

const EDGES: u64 = 8;
const STEPS: usize = 200;

fn mixed(a: u64, b: u64) -> u64 {
    let mixed = (a << 8 | b).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 20
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The matrix: one more than the degree on the diagonal, -1 for each edge. `ends`: what a vector has where
/// the edges lead.
fn times(vector: &[f64], edges: &[(usize, usize)], ends: &[[f64; 2]]) -> Vec<f64> {
    let mut product = vector.to_vec();
    for ((from, to), [at_from, at_to]) in edges.iter().zip(ends) {
        product[*from] += at_from - at_to;
        product[*to] += at_to - at_from;
    }
    product
}

pub fn run(direct: &mut Direct, nodes: u64) -> Result<Ran, Box<dyn Error>> {
    let edges: Vec<(usize, usize)> = (0..nodes * EDGES)
        .map(|edge| ((edge / EDGES) as usize, (mixed(edge / EDGES, edge % EDGES) % nodes) as usize))
        .collect();
    let vector = direct.open_or_create("vector", nodes * 8)?;
    let whole = Layout::bytes(8)?.contiguous(nodes)?;
    let places: Vec<(u64, i64)> =
        edges.iter().flat_map(|(from, to)| [(1, *from as i64 * 8), (1, *to as i64 * 8)]).collect();
    let ends = Layout::bytes(8)?.hindexed(&places)?;
    let wanted: Vec<f64> = (0..nodes).map(|node| mixed(node, 99) as f64 / (1u64 << 43) as f64).collect();
    let of_wanted: Vec<[f64; 2]> = edges.iter().map(|(from, to)| [wanted[*from], wanted[*to]]).collect();

    let mut found = vec![0.0; wanted.len()];
    let mut rest = times(&wanted, &edges, &of_wanted);
    let (mut toward, mut square, mut steps) = (rest.clone(), dot(&rest, &rest), 0);
    let (enough, mut gathering) = (square * 1e-24, Duration::ZERO);
    while square > enough && steps < STEPS {
        let started = Instant::now();
        direct.put_values(vector, 0, &whole, &toward)?;
        let gathered: Vec<f64> = direct.get_values(vector, 0, &ends)?;
        gathering += started.elapsed();
        let product = times(&toward, &edges, gathered.as_chunks().0);
        let length = square / dot(&toward, &product);
        found.iter_mut().zip(&toward).for_each(|(found, toward)| *found += length * toward);
        rest.iter_mut().zip(&product).for_each(|(rest, product)| *rest -= length * product);
        let before = std::mem::replace(&mut square, dot(&rest, &rest));
        toward.iter_mut().zip(&rest).for_each(|(toward, rest)| *toward = rest + square / before * *toward);
        steps += 1;
    }
    let worst = found.iter().zip(&wanted).map(|(found, wanted)| (found - wanted).abs()).fold(0.0, f64::max);
    if worst > 1e-9 {
        return Err(format!("after {steps} steps the solution is off by {worst}").into());
    }
    direct.free(vector);
    let says = format!("{nodes} equations with {} edges solved in {steps} steps", edges.len());
    Ok(Ran { says, measured: vec![("gathered elements", (steps * places.len()) as u64, gathering)] })
}
