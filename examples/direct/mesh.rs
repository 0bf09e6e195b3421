//! A mesh of finite elements, larger than one machine wants to hold: nodes are in the pool, triangles name
//! them in any order. Each block of triangles gathers its nodes and adds its part of the area to them, where
//! they are.

use super::ran::Ran;
use rampool::direct::{Direct, Filter, Total};
use rampool::proto::elements::Combine;
use rampool::proto::layout::Layout;
use std::collections::BTreeMap;
use std::error::Error;
use std::time::Instant;

/// Of a node: its two coordinates, and the area that belongs to it.
const NODE_BYTES: i64 = 24;
const AREA: u64 = 16;
const BLOCK: usize = 512;

/// The nodes of both triangles of each square, in an order that is none of the nodes'.
fn triangles(side: u64) -> Vec<[u64; 3]> {
    let corners = (0..side * side).map(|square| square / side * (side + 1) + square % side);
    let mut all: Vec<[u64; 3]> = corners
        .flat_map(|corner| {
            let above = corner + side + 1;
            [[corner, corner + 1, above], [corner + 1, above + 1, above]]
        })
        .collect();
    all.sort_by_key(|[one, other, _]| (one ^ other << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    all
}

pub fn run(direct: &mut Direct, side: u64) -> Result<Ran, Box<dyn Error>> {
    let nodes = (side + 1) * (side + 1);
    let mesh = direct.open_or_create("mesh", nodes * NODE_BYTES.cast_unsigned())?;
    let start: Vec<f64> = (0..nodes)
        .flat_map(|node| {
            let (x, y) = (node % (side + 1), node / (side + 1));
            // Nodes inside are off their places: their triangles differ, and all fill the square.
            let inside = x % side != 0 && y % side != 0;
            let off = if inside { (node * 7 % 5) as f64 / 10.0 } else { 0.0 };
            [(x as f64 + off) / side as f64, (y as f64 - off) / side as f64, 0.0]
        })
        .collect();
    direct.put_values(mesh, 0, &Layout::bytes(8)?.contiguous(nodes * 3)?, &start)?;

    let triangles = triangles(side);
    let started = Instant::now();
    for block in triangles.chunks(BLOCK) {
        let places: Vec<(u64, i64)> =
            block.iter().flatten().map(|node| (1, node.cast_signed() * NODE_BYTES)).collect();
        let corners: Vec<f64> = direct.get_values(mesh, 0, &Layout::bytes(16)?.hindexed(&places)?)?;
        // A node may be in several triangles of the block, but in an update only once.
        let mut areas = BTreeMap::new();
        for (triangle, corner) in block.iter().zip(corners.as_chunks::<6>().0) {
            let [ax, ay, bx, by, cx, cy] = *corner;
            let area = ((bx - ax) * (cy - ay) - (cx - ax) * (by - ay)) / 2.0;
            triangle.iter().for_each(|node| *areas.entry(*node).or_insert(0.0) += area / 3.0);
        }
        let places: Vec<(u64, i64)> = areas.keys().map(|node| (1, node.cast_signed() * NODE_BYTES)).collect();
        let parts: Vec<f64> = areas.into_values().collect();
        direct.accumulate(mesh, AREA, &Layout::bytes(8)?.hindexed(&places)?, Combine::Sum, &parts)?;
    }
    let took = started.elapsed();
    let column = Layout::bytes(8)?.hvector(nodes, 1, NODE_BYTES)?;
    match direct.sum(mesh, AREA, &column, Filter::<f64>::all())? {
        (count, Total::Float(area)) if count == nodes && (area - 1.0).abs() < 1e-9 => {}
        other => return Err(format!("the nodes' areas are {other:?}, not 1").into()),
    }
    direct.free(mesh);
    let says = format!("{} triangles between {nodes} nodes have the area of their square", triangles.len());
    Ok(Ran { says, measured: vec![("triangles", triangles.len() as u64, took)] })
}
