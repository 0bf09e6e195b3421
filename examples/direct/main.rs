//! Programs on the direct view, each of which checks its result. See docs/guide/direct.md.
//!
//! ```console
//! $ cargo run --release -p rampool --example direct -- scan
//! $ cargo run --release -p rampool --example direct -- store memhost1 memhost2
//! $ cargo run --release -p rampool --example direct -- halo
//! $ cargo run --release -p rampool --example direct -- ledger
//! $ cargo run --release -p rampool --example direct -- service
//! $ cargo run --release -p rampool --example direct -- search
//! $ cargo run --release -p rampool --example direct -- solver
//! $ cargo run --release -p rampool --example direct -- mesh
//! $ cargo run --release -p rampool --example direct -- video
//! ```
//! Without servers on the command line, it starts two in this process.
#![allow(clippy::cast_possible_truncation)]

mod halo;
mod ledger;
mod mesh;
mod ran;
mod scan;
mod search;
mod service;
mod solver;
mod store;
mod video;

use rampool::direct::Direct;
use rampool::pool::{PoolConfig, ServerSpec};
use rampool::proto::units::ByteLen;
use rampool::server::{RunningServer, Server, ServerConfig};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let run = match arguments.first().map(String::as_str) {
        Some("scan") => |direct: &mut Direct| scan::run(direct, 16 * 1024),
        Some("store") => |direct: &mut Direct| store::run(direct, 4, 5_000),
        Some("halo") => |direct: &mut Direct| halo::run(direct, 32),
        Some("ledger") => |direct: &mut Direct| ledger::run(direct, 100_000, 4, 20_000, 64),
        Some("service") => |direct: &mut Direct| service::run(direct, 4, 50, 1 << 20),
        Some("search") => |direct: &mut Direct| search::run(direct, 1000, 100_000, 5_000),
        Some("solver") => |direct: &mut Direct| solver::run(direct, 50_000),
        Some("mesh") => |direct: &mut Direct| mesh::run(direct, 300),
        Some("video") => |direct: &mut Direct| video::run(direct, 4, 64, 50),
        _ => {
            return Err(
                "name an example: scan, store, halo, ledger, service, search, solver, mesh or video; \
                        memory servers may follow"
                    .into(),
            );
        }
    };
    let mut servers: Vec<ServerSpec> =
        arguments[1..].iter().map(|server| server.parse()).collect::<Result<_, _>>()?;
    let mut own: Vec<RunningServer> = Vec::new();
    if servers.is_empty() {
        for _ in 0..2 {
            own.push(Server::start(ServerConfig::new(256 << 20, "127.0.0.1:0".parse()?))?);
        }
        servers =
            own.iter().map(|server| ServerSpec { endpoint: server.addr().clone(), memory: None }).collect();
    }
    let mut direct = Direct::connect(&PoolConfig::new(servers, ByteLen(256 << 20), "direct example"))?;
    let ran = run(&mut direct)?;
    println!("{}", ran.says);
    for (what, amount, took) in ran.measured {
        println!("{:.0} {what} a second", amount as f64 / took.as_secs_f64());
    }
    direct.close();
    Ok(())
}
