//! The costs of faults, twins, diffs and messages, after S4's method (Barli, Watanabe, Sakai and Tanaka): the
//! requesting rank waits for the latency of request and reply; the answering rank loses the processor time of
//! both.
//!
//! The program is run again by the engines themselves, so a protocol's decisions may change with the network.
//! Times are in microseconds.

use rampool_sharing::{Body, Stats};

/// One processor and one network.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cost {
    /// A page fault, from the access to the handler and back.
    pub fault_us: f64,
    /// A change of protection of one run of pages.
    pub protect_us: f64,
    /// Copying a kibibyte.
    pub copy_us_per_kib: f64,
    /// Comparing a kibibyte.
    pub compare_us_per_kib: f64,
    /// The system call that sends or receives.
    pub call_us: f64,
    /// The kernel's work for each packet, on each side.
    pub packet_us: f64,
    pub interrupt_us: f64,
    pub wire_us: f64,
    pub wire_us_per_kib: f64,
    pub packet_bytes: u64,
    pub page_bytes: u64,
    /// Hardware that sends each write to the page's home at once: no twins and diffs, and nothing left to
    /// send at a release.
    pub automatic_update: bool,
}

impl Cost {
    /// S4's machines and network: processors of 75 MHz, 8 KiB pages, UDP on Ethernet of 100 Mbit/s. 4000
    /// cycles for each packet and side, 3000 for an interrupt. The paper measured, but does not print, the
    /// costs of a system call, a signal and a copy. The values here are this project's estimate: a read fault
    /// then takes 4 ms, at the lower end of the "several to tens" that the paper reports.
    #[must_use]
    pub fn ethernet_1999() -> Self {
        Self {
            fault_us: 500.0,
            protect_us: 50.0,
            copy_us_per_kib: 50.0,
            compare_us_per_kib: 60.0,
            call_us: 400.0,
            packet_us: 53.3,
            interrupt_us: 40.0,
            wire_us: 20.0,
            wire_us_per_kib: 84.0,
            packet_bytes: 1480,
            page_bytes: 8192,
            automatic_update: false,
        }
    }

    /// S5's machines: Pentiums of 166 MHz, 4 KiB pages, UDP on Ethernet of 100 Mbit/s. All values are this
    /// project's estimate.
    #[must_use]
    pub fn pentium_1999() -> Self {
        Self {
            fault_us: 50.0,
            protect_us: 10.0,
            copy_us_per_kib: 12.0,
            compare_us_per_kib: 15.0,
            call_us: 40.0,
            packet_us: 25.0,
            interrupt_us: 15.0,
            page_bytes: 4096,
            ..Self::ethernet_1999()
        }
    }

    /// The processor's time for sending a message of `bytes`.
    #[must_use]
    pub fn send_us(&self, body: &Body, bytes: u64) -> u64 {
        if self.is_free(body) {
            return 0;
        }
        whole(self.call_us + self.packets(bytes) * self.packet_us)
    }

    /// The processor's time for receiving one, including the handling of its content.
    #[must_use]
    pub fn receive_us(&self, body: &Body, bytes: u64) -> u64 {
        if self.is_free(body) {
            return 0;
        }
        whole(
            self.interrupt_us
                + self.call_us
                + self.packets(bytes) * self.packet_us
                + kib(bytes) * self.copy_us_per_kib,
        )
    }

    /// How long the message keeps the wire busy.
    #[must_use]
    pub fn wire_us(&self, body: &Body, bytes: u64) -> u64 {
        if self.is_free(body) { 0 } else { whole(kib(bytes) * self.wire_us_per_kib) }
    }

    /// The wire's length.
    #[must_use]
    pub fn latency_us(&self) -> u64 {
        whole(self.wire_us)
    }

    /// The processor's time for an engine's work, from its counts before and after.
    #[must_use]
    pub fn engine_us(&self, before: &Stats, after: &Stats) -> u64 {
        let page = kib(self.page_bytes);
        let more = |count: fn(&Stats) -> u64| number(count(after) - count(before));
        let faults = more(|stats| stats.read_faults) + more(|stats| stats.write_faults);
        let mut us = faults * self.fault_us + more(|stats| stats.protects) * self.protect_us;
        if !self.automatic_update {
            us += more(|stats| stats.twins) * page * self.copy_us_per_kib;
            us += more(|stats| stats.diffs) * page * self.compare_us_per_kib;
        }
        whole(us)
    }

    /// With automatic update the changes of a release are at the home already.
    fn is_free(&self, body: &Body) -> bool {
        self.automatic_update && matches!(body, Body::Flush { .. } | Body::FlushAck { .. })
    }

    fn packets(&self, bytes: u64) -> f64 {
        number((bytes + 8).div_ceil(self.packet_bytes))
    }
}

fn number(count: u64) -> f64 {
    f64::from(u32::try_from(count).expect("counts in one step are small"))
}

fn kib(bytes: u64) -> f64 {
    number(bytes) / 1024.0
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times are positive and far below 2^53"
)]
fn whole(us: f64) -> u64 {
    us.round() as u64
}
