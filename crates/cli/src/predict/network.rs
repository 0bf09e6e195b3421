//! What a message costs on a network: S4's parameters, in the general form of LogGP with costs for packets and interrupts.
//!
//! A message of n bytes in k packets costs its sender `send + k * per_packet + n * per_byte` of CPU time, occupies the link for the bytes on the wire, arrives
//! after `latency` more, and costs the receiver `interrupt + receive + k * per_packet + n * per_byte`.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use super::recording::Recording;

/// A network. Times in microseconds.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    pub name: String,
    /// The sender's software, a message.
    pub send_us: f64,
    /// The receiver's.
    pub receive_us: f64,
    /// At either side.
    #[serde(default)]
    pub per_packet_us: f64,
    /// At either side: copies and checksums.
    #[serde(default)]
    pub per_byte_us: f64,
    #[serde(default)]
    pub interrupt_us: f64,
    /// Wire and switches.
    pub latency_us: f64,
    /// Of the link, in MB (10^6 bytes) a second.
    pub mb_per_s: f64,
    /// Of a packet, without headers.
    #[serde(default = "packet_bytes")]
    pub packet_bytes: f64,
    /// On the wire, a packet.
    #[serde(default)]
    pub header_bytes: f64,
}

fn packet_bytes() -> f64 {
    f64::MAX
}

/// A message's way.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cost {
    /// CPU time of the sender.
    pub sending_us: f64,
    /// The link is occupied.
    pub wire_us: f64,
    pub latency_us: f64,
    /// CPU time of the receiver.
    pub receiving_us: f64,
}

impl Cost {
    /// Of a message that finds nothing in its way.
    pub fn single_trip_us(self) -> f64 {
        self.sending_us + self.wire_us + self.latency_us + self.receiving_us
    }

    /// Without software on either side.
    pub fn by_hardware(self) -> Self {
        Self { sending_us: 0.0, receiving_us: 0.0, ..self }
    }
}

impl Network {
    pub fn cost(&self, bytes: u64) -> Cost {
        let bytes = bytes as f64;
        let packets = (bytes / self.packet_bytes).ceil().max(1.0);
        let software = packets * self.per_packet_us + bytes * self.per_byte_us;
        Cost {
            sending_us: self.send_us + software,
            wire_us: (bytes + packets * self.header_bytes) / self.mb_per_s,
            latency_us: self.latency_us,
            receiving_us: self.interrupt_us + self.receive_us + software,
        }
    }

    /// The networks that have names.
    pub fn presets() -> Vec<Self> {
        let ethernet = |name: &str, software: f64, latency_us: f64, mb_per_s: f64| Self {
            name: name.to_owned(),
            send_us: software,
            receive_us: software,
            per_packet_us: 0.0,
            per_byte_us: 0.0,
            interrupt_us: 0.0,
            latency_us,
            mb_per_s,
            packet_bytes: 1448.0,
            header_bytes: 90.0,
        };
        // S4's nodes: 75 MHz; 4000 cycles a packet in the protocol and driver at either side, 3000 an interrupt; the socket call and its copy at about 50 MB/s.
        let old = Self {
            name: "eth100-1999".to_owned(),
            send_us: 15.0,
            receive_us: 15.0,
            per_packet_us: 4000.0 / 75.0,
            per_byte_us: 0.02,
            interrupt_us: 40.0,
            latency_us: 10.0,
            mb_per_s: 12.5,
            packet_bytes: 1480.0,
            header_bytes: 58.0,
        };
        // 400 cycles at either side and an interrupt; the adapter moves the bytes itself over a bus of 132 MB/s, while they are on the link.
        let low_overhead = |name: &str, mb_per_s: f64| Self {
            name: name.to_owned(),
            send_us: 400.0 / 75.0,
            receive_us: 400.0 / 75.0,
            per_packet_us: 0.0,
            per_byte_us: 0.0,
            interrupt_us: 40.0,
            latency_us: 2.0,
            mb_per_s,
            packet_bytes: packet_bytes(),
            header_bytes: 0.0,
        };
        vec![
            old,
            low_overhead("loh", 12.5),
            low_overhead("loh-hb", 125.0),
            ethernet("eth1g", 5.0, 20.0, 125.0),
            ethernet("eth10g", 4.0, 8.0, 1250.0),
            ethernet("eth25g", 4.0, 6.0, 3125.0),
            Self {
                name: "rdma100".to_owned(),
                send_us: 0.3,
                receive_us: 0.3,
                per_packet_us: 0.0,
                per_byte_us: 0.0,
                interrupt_us: 0.0,
                latency_us: 1.5,
                mb_per_s: 12_500.0,
                packet_bytes: 4096.0,
                header_bytes: 60.0,
            },
            ethernet("wan", 5.0, 10_000.0, 12.5),
        ]
    }

    /// A preset, or a TOML file with the fields of this type.
    ///
    /// # Errors
    /// Neither of them, or numbers that are not costs.
    pub fn named(name: &str) -> Result<Self> {
        let presets = Self::presets();
        if let Some(found) = presets.iter().find(|network| network.name == name) {
            return Ok(found.clone());
        }
        let names: Vec<_> = presets.iter().map(|network| network.name.as_str()).collect();
        let path = Path::new(name);
        if !path.exists() {
            bail!("there is no network {name}, and no file of that name; networks are {}", names.join(", "));
        }
        let text = std::fs::read_to_string(path).with_context(|| format!("{name} cannot be read"))?;
        let network: Self = toml::from_str(&text).with_context(|| format!("{name} is not a network"))?;
        network.check().with_context(|| format!("{name} is not a network"))?;
        Ok(network)
    }

    fn check(&self) -> Result<()> {
        let times = [
            ("send_us", self.send_us),
            ("receive_us", self.receive_us),
            ("per_packet_us", self.per_packet_us),
            ("per_byte_us", self.per_byte_us),
            ("interrupt_us", self.interrupt_us),
            ("latency_us", self.latency_us),
            ("header_bytes", self.header_bytes),
        ];
        for (name, value) in times {
            ensure!((0.0..1e12).contains(&value), "{name} is {value}");
        }
        ensure!(self.mb_per_s > 0.0 && self.mb_per_s.is_finite(), "mb_per_s is {}", self.mb_per_s);
        ensure!(self.packet_bytes >= 1.0, "packet_bytes is {}", self.packet_bytes);
        Ok(())
    }

    /// What messages cost where they were recorded: a line through sizes and latencies. Each size counts with the least quarter of its latencies: what is
    /// above waited for a busy rank, which is not the network's.
    pub fn recorded(recording: &Recording) -> Option<Self> {
        let mut classes: std::collections::BTreeMap<u32, Vec<(u64, f64)>> = std::collections::BTreeMap::new();
        for (bytes, us) in recording.latencies() {
            classes.entry(bytes.max(1).ilog2()).or_default().push((bytes, us));
        }
        let mut points = Vec::new();
        for (_, mut class) in classes {
            class.sort_by(|a, b| a.1.total_cmp(&b.1));
            let keep = class.len().div_ceil(4);
            let (bytes, us) = class[..keep].iter().fold((0.0, 0.0), |sum, &(bytes, us)| (sum.0 + bytes as f64, sum.1 + us));
            points.push(Point { bytes: bytes / keep as f64, us: us / keep as f64, weight: class.len() as f64 });
        }
        let (fixed, per_byte) = fit(&points)?;
        // The sender's part is in what the trace says of the sender.
        Some(Self::line("as recorded", fixed, per_byte))
    }

    /// This network, and what another costs beyond it: round trips with answers of several sizes, in microseconds.
    pub fn beyond(&self, name: &str, more: &[(u64, f64)]) -> Self {
        let points: Vec<_> = more.iter().map(|&(bytes, us)| Point { bytes: bytes as f64, us, weight: 1.0 / us.max(1.0) }).collect();
        let (round_trip_us, per_byte) = fit(&points).unwrap_or((0.0, 0.0));
        Self {
            name: name.to_owned(),
            latency_us: self.latency_us + round_trip_us / 2.0,
            mb_per_s: 1.0 / (1.0 / self.mb_per_s + per_byte),
            ..self.clone()
        }
    }

    /// Of messages that cost nothing but a fixed time and one for each byte.
    pub fn line(name: &str, latency_us: f64, per_byte_us: f64) -> Self {
        Self {
            name: name.to_owned(),
            send_us: 0.0,
            receive_us: 0.0,
            per_packet_us: 0.0,
            per_byte_us: 0.0,
            interrupt_us: 0.0,
            latency_us,
            mb_per_s: 1.0 / per_byte_us,
            packet_bytes: packet_bytes(),
            header_bytes: 0.0,
        }
    }
}

struct Point {
    bytes: f64,
    us: f64,
    weight: f64,
}

/// Least squares. No network is faster than 100 GB/s or has a negative latency.
fn fit(points: &[Point]) -> Option<(f64, f64)> {
    let weight: f64 = points.iter().map(|point| point.weight).sum();
    if points.is_empty() || weight <= 0.0 {
        return None;
    }
    let mean = |value: &dyn Fn(&Point) -> f64| points.iter().map(|point| point.weight * value(point)).sum::<f64>() / weight;
    let (bytes, us) = (mean(&|point| point.bytes), mean(&|point| point.us));
    let spread = mean(&|point| (point.bytes - bytes).powi(2));
    let slope = if spread > 0.0 { mean(&|point| (point.bytes - bytes) * (point.us - us)) / spread } else { 0.0 };
    let slope = slope.max(1e-5);
    Some(((us - slope * bytes).max(0.0), slope))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_agree_with_what_the_paper_says() {
        let trip = |name: &str, bytes: u64| Network::named(name).unwrap().cost(bytes);
        let page = trip("eth100-1999", 8192);
        // 6 packets: 320 us of protocol and driver at either side, 0.68 ms on the wire.
        assert!((page.sending_us - 15.0 - 8192.0 * 0.02 - 320.0).abs() < 1.0, "{page:?}");
        assert!((page.wire_us - 683.0).abs() < 5.0, "{page:?}");
        assert!(trip("eth100-1999", 16).single_trip_us() > 150.0);
        let page = trip("loh", 8192).single_trip_us();
        assert!((page - 710.0).abs() < 30.0, "{page}");
        let page = trip("loh-hb", 8192).single_trip_us();
        assert!((page - 120.0).abs() < 15.0, "{page}");
    }

    #[test]
    fn what_a_link_costs_more_is_found_again() {
        let base = Network::line("base", 10.0, 0.001);
        let more: Vec<(u64, f64)> = [64, 1024, 4096, 16384].map(|bytes: u64| (bytes, 60.0 + bytes as f64 * 0.008)).to_vec();
        let link = base.beyond("link", &more);
        assert!((link.latency_us - 40.0).abs() < 0.01, "{link:?}");
        assert!((link.cost(1000).single_trip_us() - 49.0).abs() < 0.01, "{link:?}");
        let same = base.beyond("the same", &[]);
        assert!((same.cost(1000).single_trip_us() - base.cost(1000).single_trip_us()).abs() < 0.01);
    }

    #[test]
    fn networks_that_cannot_be_are_refused() {
        let error = Network::named("token-ring").unwrap_err().to_string();
        assert!(error.contains("networks are eth100-1999"), "{error}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.toml");
        let check = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Network::named(path.to_str().unwrap()).map_err(|error| format!("{error:#}"))
        };
        let good = "name = 'mine'\nsend_us = 1\nreceive_us = 2\nlatency_us = 3\nmb_per_s = 100\n";
        let mine = check(good).unwrap();
        assert!((mine.cost(1000).single_trip_us() - 16.0).abs() < 1e-9);
        assert!(check(&good.replace("= 100", "= 0")).unwrap_err().contains("mb_per_s is 0"));
        assert!(check(&good.replace("send_us = 1", "send_us = -1")).unwrap_err().contains("send_us is -1"));
        assert!(check(&good.replace("send_us", "sent_us")).unwrap_err().contains("unknown field"));
    }
}
