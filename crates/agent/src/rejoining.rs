//! Servers that this process has lost are joined anew, once there is a lease of the run again.
//!
//! The process that owns the run's lease knocks at servers that are lost, and says in the run's directory
//! where it has leased memory, and which servers are silent. A process looks there while it has lost one, and
//! when that changes.

use std::time::{Duration, Instant, SystemTime};

use rampool_client::pool::{Membership, Pool};
use rampool_pager::pager::Pager;
use rampool_run::process_registry::Signature;
use rampool_run::settings::Settings;

const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often the lease that was lost is tried again: the server may have given up this process alone.
const TRY_AGAIN: Duration = Duration::from_secs(5);

pub struct Rejoining {
    looked: Instant,
    tried_again: Instant,
    /// When what the run says was written that was read last.
    changed: Option<SystemTime>,
    /// Held as long as the process lives.
    signature: Option<Signature>,
    /// Who the run knows that this process is.
    told: Option<Membership>,
}

impl Rejoining {
    pub fn new(signature: Option<Signature>) -> Self {
        Self { looked: Instant::now(), tried_again: Instant::now(), changed: None, signature, told: None }
    }

    pub fn look(&mut self, pager: &mut Pager<Pool>, settings: &Settings) {
        if pager.backing().copies() < 2 {
            return;
        }
        // At once: a child that ends before the run knows of it is a member for the grace time, and a server
        // that drains waits for it.
        if let Some(signature) = &mut self.signature
            && !self.told.as_ref().is_some_and(|told| pager.backing().is_member_as(told))
        {
            let membership = pager.backing().membership();
            let _ = signature.joined(&membership);
            self.told = Some(membership);
        }
        if self.looked.elapsed() < LOOK_EVERY {
            return;
        }
        self.looked = Instant::now();
        let lost: Vec<_> = pager.backing().lost_servers().collect();
        let changed = Settings::changed_at(&settings.run_dir);
        if lost.is_empty() && changed == self.changed {
            return;
        }
        self.changed = changed;
        // Without the rights to read it, the process goes on as it is.
        let Ok(Settings { ticket, .. }) = Settings::read(&settings.run_dir) else { return };
        pager.grow_to(&ticket);
        let again = self.tried_again.elapsed() >= TRY_AGAIN;
        if again {
            self.tried_again = Instant::now();
        }
        for server in lost {
            if again || !ticket.is_same_at(&pager.backing().lease_ticket(), server) {
                pager.join_anew(server, &ticket);
            }
        }
    }
}
