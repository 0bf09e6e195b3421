//! What a message costs on a network: S4's parameters, in the general form of LogGP with costs for packets
//! and interrupts.
//!
//! A message of n bytes in k packets costs its sender `send + k * per_packet + n * per_byte` of CPU time,
//! occupies the link for the bytes on the wire, arrives after `latency` more, and costs the receiver
//! `interrupt + receive + k * per_packet + n * per_byte`. If the receiver computes instead of polling, the
//! message is handled `wake` later. An idle link passes `burst` bytes at once, as a token bucket does.

use std::collections::BTreeMap;
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
    /// Delay if the receiver computes: the answering thread has to wake.
    #[serde(default)]
    pub wake_us: f64,
    /// Bytes that pass an idle link at once: the token bucket's, where a link is made with one.
    #[serde(default)]
    pub burst_bytes: f64,
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

/// One end of a link: how many bytes have passed it, as a token bucket counts. At first the bucket is full.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// When all that has passed would have, without a burst.
    paid_us: f64,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { paid_us: f64::NEG_INFINITY }
    }
}

impl Bucket {
    /// When the last byte has passed of a message that comes at `at_us` and takes `wire_us`.
    pub fn pass(&mut self, at_us: f64, wire_us: f64, burst_us: f64) -> f64 {
        self.paid_us = self.paid_us.max(at_us - burst_us) + wire_us;
        self.paid_us.max(at_us)
    }
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

    /// The link's time for its burst.
    pub fn burst_us(&self) -> f64 {
        self.burst_bytes / self.mb_per_s
    }

    /// The networks that have names.
    pub fn presets() -> Vec<Self> {
        let line = |name: &str, latency_us: f64, mb_per_s: f64| Self {
            mb_per_s,
            ..Self::line(name, latency_us, 1.0)
        };
        let ethernet = |name: &str, software: f64, latency_us: f64, mb_per_s: f64| Self {
            send_us: software,
            receive_us: software,
            packet_bytes: 1448.0,
            header_bytes: 90.0,
            ..line(name, latency_us, mb_per_s)
        };
        // S4's nodes: 75 MHz; 4000 cycles a packet in the protocol and driver at either side, 3000 an
        // interrupt; the socket call and its copy at about 50 MB/s.
        let old = Self {
            send_us: 15.0,
            receive_us: 15.0,
            per_packet_us: 4000.0 / 75.0,
            per_byte_us: 0.02,
            interrupt_us: 40.0,
            packet_bytes: 1480.0,
            header_bytes: 58.0,
            ..line("eth100-1999", 10.0, 12.5)
        };
        // 400 cycles at either side and an interrupt; the adapter moves the bytes itself over a bus of 132
        // MB/s, while they are on the link.
        let low_overhead = |name: &str, mb_per_s: f64| Self {
            send_us: 400.0 / 75.0,
            receive_us: 400.0 / 75.0,
            interrupt_us: 40.0,
            ..line(name, 2.0, mb_per_s)
        };
        let rdma = Self {
            send_us: 0.3,
            receive_us: 0.3,
            packet_bytes: 4096.0,
            header_bytes: 60.0,
            ..line("rdma100", 1.5, 12_500.0)
        };
        vec![
            old,
            low_overhead("loh", 12.5),
            low_overhead("loh-hb", 125.0),
            ethernet("eth1g", 5.0, 20.0, 125.0),
            ethernet("eth10g", 4.0, 8.0, 1250.0),
            ethernet("eth25g", 4.0, 6.0, 3125.0),
            rdma,
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
            bail!("unknown network {name}, and no file has that name; networks are {}", names.join(", "));
        }
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {name}"))?;
        let network: Self =
            toml::from_str(&text).with_context(|| format!("{name} does not describe a network"))?;
        network.check().with_context(|| format!("{name} does not describe a network"))?;
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
            ("wake_us", self.wake_us),
            ("burst_bytes", self.burst_bytes),
        ];
        for (name, value) in times {
            ensure!((0.0..1e12).contains(&value), "{name} is {value}");
        }
        ensure!(self.mb_per_s > 0.0 && self.mb_per_s.is_finite(), "mb_per_s is {}", self.mb_per_s);
        ensure!(self.packet_bytes >= 1.0, "packet_bytes is {}", self.packet_bytes);
        Ok(())
    }

    /// The cost of messages where they were recorded: a line through sizes and the mean latency of each, to
    /// receivers that waited; and the extra delay if the receiver computed. Only messages count that met no
    /// other: how long others queue is for a replay to find. A mean, because a rank's time is a sum, to which
    /// the few messages that come late add as much as the many that do not.
    pub fn recorded(recording: &Recording) -> Option<Self> {
        let mut classes: BTreeMap<u32, [Vec<(u64, f64)>; 2]> = BTreeMap::new();
        for (bytes, us, waits) in recording.latencies() {
            classes.entry(bytes.max(1).ilog2()).or_default()[usize::from(!waits)].push((bytes, us));
        }
        let points = |of: usize| classes.values().filter_map(move |class| point(&class[of]));
        let both =
            classes.values().filter_map(|[waiting, computing]| Some((point(waiting)?, point(computing)?)));
        let (later, weight) = both.fold((0.0, 0.0), |(later, weight), (waiting, computing)| {
            let both = waiting.weight.min(computing.weight);
            (later + both * (computing.us - waiting.us), weight + both)
        });
        let wake_us = if weight > 0.0 { (later / weight).max(0.0) } else { 0.0 };
        let computing = points(1).map(|point| Point { us: (point.us - wake_us).max(0.0), ..point });
        let (fixed, per_byte) = fit(&points(0).chain(computing).collect::<Vec<_>>())?;
        // The sender's part is in what the trace says of the sender.
        Some(Self { wake_us, ..Self::line("as recorded", fixed, per_byte) })
    }

    /// This network with a link in it: so much later, over packets as `link` has them, at its rate and with
    /// its burst.
    pub fn over(&self, link: &Self) -> Self {
        Self {
            name: link.name.clone(),
            latency_us: self.latency_us + link.latency_us,
            mb_per_s: 1.0 / (1.0 / self.mb_per_s + 1.0 / link.mb_per_s),
            packet_bytes: link.packet_bytes,
            header_bytes: link.header_bytes,
            burst_bytes: link.burst_bytes,
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
            wake_us: 0.0,
            burst_bytes: 0.0,
        }
    }
}

/// The mean of some messages of about one size.
fn point(messages: &[(u64, f64)]) -> Option<Point> {
    let weight = messages.len() as f64;
    let mean = |sum: f64| sum / weight;
    (!messages.is_empty()).then(|| Point {
        bytes: mean(messages.iter().map(|&(bytes, _)| bytes as f64).sum()),
        us: mean(messages.iter().map(|&(_, us)| us).sum()),
        weight,
    })
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
    let mean = |value: &dyn Fn(&Point) -> f64| {
        points.iter().map(|point| point.weight * value(point)).sum::<f64>() / weight
    };
    let (bytes, us) = (mean(&|point| point.bytes), mean(&|point| point.us));
    let spread = mean(&|point| (point.bytes - bytes).powi(2));
    let slope =
        if spread > 0.0 { mean(&|point| (point.bytes - bytes) * (point.us - us)) / spread } else { 0.0 };
    let slope = slope.max(1e-5);
    Some(((us - slope * bytes).max(0.0), slope))
}

#[cfg(test)]
mod tests {
    use super::super::recording::tests::parse;
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
    fn a_link_in_a_network_adds_its_latency_and_its_bytes() {
        let base = Network { wake_us: 7.0, ..Network::line("base", 10.0, 0.001) };
        let link = Network {
            packet_bytes: 1000.0,
            header_bytes: 50.0,
            burst_bytes: 2000.0,
            ..Network::line("link", 30.0, 0.008)
        };
        let both = base.over(&link);
        assert_eq!((both.name.as_str(), both.wake_us, both.burst_bytes), ("link", 7.0, 2000.0));
        // 2000 bytes in two packets, of which each byte takes 9 ns.
        assert!((both.cost(2000).single_trip_us() - 40.0 - 2100.0 * 0.009).abs() < 0.01, "{both:?}");
        assert!((both.burst_us() - 18.0).abs() < 0.01);
    }

    #[test]
    fn an_idle_link_lets_its_burst_pass_at_once() {
        let mut bucket = Bucket::default();
        // A burst of 40 us: a message of 30 us at once, of the next 10, then the link's own time; full again
        // after a pause.
        let passed: Vec<f64> = [(100.0, 30.0), (100.0, 30.0), (101.0, 30.0), (1000.0, 60.0)]
            .map(|(at, wire)| bucket.pass(at, wire, 40.0))
            .to_vec();
        assert_eq!(passed, [100.0, 120.0, 150.0, 1020.0]);
        let mut none = Bucket::default();
        assert_eq!([(100.0, 30.0), (100.0, 30.0)].map(|(at, wire)| none.pass(at, wire, 0.0)), [130.0, 160.0]);
    }

    /// A message of rank 1 to rank 0, as either writes it: sent, and handled for so long. Nanoseconds.
    fn message(ranks: &mut [Vec<String>; 2], sent: u64, came: u64, bytes: u64, ns: u64) {
        ranks[0].push(format!(
            r#"{{"at_ns":{came},"event":"receive","from":1,"type":"ScInvalidate","ns":{ns}}}"#
        ));
        ranks[1].push(format!(
            r#"{{"at_ns":{sent},"event":"send","to":0,"type":"ScInvalidate","bytes":{bytes}}}"#
        ));
    }

    fn recorded(ranks: &[Vec<String>; 2]) -> Network {
        let texts = ranks.each_ref().map(|file| file.iter().map(String::as_str).collect::<Vec<_>>());
        Network::recorded(&parse(&[&texts[0], &texts[1]]).unwrap()).unwrap()
    }

    #[test]
    fn what_messages_cost_where_they_were_recorded_is_found_again() {
        // Rank 0 computes until 1280 us and waits from then on; in either half it gets messages of 100 and of
        // 5000 bytes by turns.
        let other = vec![r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#.to_owned()];
        let mut ranks = [other.clone(), other];
        ranks[0]
            .push(r#"{"at_ns":1280000,"event":"wait","thread":0,"what":"barrier","ns":2000000}"#.to_owned());
        for number in 0..64 {
            let (sent, bytes) = (5000 + number * 40_000, if number % 2 == 0 { 100 } else { 5000 });
            // 6 us, a nanosecond a byte, and 20 us for waking.
            let came = sent + 6000 + bytes + if number < 32 { 20_000 } else { 0 };
            message(&mut ranks, sent, came, bytes, 100);
        }
        let found = recorded(&ranks);
        assert!((found.latency_us - 6.0).abs() < 0.1 && (found.wake_us - 20.0).abs() < 0.1, "{found:?}");
        assert!((found.mb_per_s - 1000.0).abs() < 1.0, "{found:?}");
    }

    #[test]
    fn messages_that_queued_do_not_tell_what_one_costs() {
        // Rank 1 sends ten at once, each of which is handled for 50 us; the first comes after 8 us.
        let mut ranks = [
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"barrier","ns":900000}"#,
            r#"{"at_ns":0,"event":"wait","thread":0,"what":"other","ns":1000}"#,
        ]
        .map(|wait| vec![wait.to_owned()]);
        for number in 0..10 {
            message(&mut ranks, 5000 + number, 13_000 + number * 50_000, 14, 50_000);
        }
        let found = recorded(&ranks);
        assert!((found.latency_us - 8.0).abs() < 0.1, "{found:?}");
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
