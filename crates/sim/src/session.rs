//! The client's sessions ([`rampool_session`]) against memory servers with the real lease engine: a program
//! that stores, fetches, updates and reads, a network that cuts, delays and keeps silent, servers that end,
//! are slow, full or lie, and a client that gets no time.
//!
//! In many runs with two copies the program forks: the child is a second client with connections, operations
//! and a judge of its own. It takes over a clone of the parent's region as that was then, and both go on.
//!
//! After every step the judge checks, by name:
//!
//! ```text
//!   one-end                      every operation ends in exactly one event
//!   every-part                   ... and not before its last part
//!   memory-returned              ... when no connection has its memory any more
//!   ends-in-time                 nothing waits past its deadline
//!   completes-after-faults       when the faults stop, everything ends
//!   fetched-is-stored            a fetched page is what was last acknowledged, or stored or discarded since
//!   acknowledged-is-kept         an acknowledged store lies at its server as long as that lives
//!   update-once, region-once     an update takes effect once, a region is made once
//!   updates-in-order,
//!   reads-in-order               ... in the order in which they were made
//!   fails-as-one                 an operation whose part failed fails
//!   asks-again-once,
//!   corrupt-is-damaged-twice     a page is given up only when it came damaged twice
//!   credits-kept                 no more is outstanding than was granted
//!   demand-finds-room,
//!   bulk-window, demand-first    what a thread waits for does not wait behind what none waits for
//!   control-is-not-starved       a control request is the next that leaves
//!   nothing-from-another-run     no byte of another run of a server, or for another member, is believed
//!   honest-is-not-blamed,
//!   slow-is-not-dead,
//!   paused-client-does-not-blame,
//!   reachable-is-not-lost        a server is lost only with a reason
//!   lost-once, given-up-is-lost  ... once, and when it says so itself
//!   idle-notices                 an idle session asks whether its server is there
//!   no-hammering                 attempts to connect are some time apart
//!   breaks-end,
//!   reconnecting-ends            a connection is not made again for ever
//!   one-holder-suffices          an operation fails only where all holders of a page are lost
//!   acknowledged-is-kept         ... at every holder that is not lost
//!   reads-find-a-holder          a thread does not wait for one holder while nothing is wrong with the other
//!   stored-is-not-missed         what a server has acknowledged, it has not missed
//!   full-has-a-reason            a store fails for lack of room only where a server had none, or was away
//!   spares-are-used              a server without a connection is soon done without, if others fill in
//!   kept-is-had                  what was acknowledged has a holder, as long as none of the two was lost
//!   loses-pages-only             a lost server costs no more than what others have missed, if they are up
//!   freed-is-freed               no server has a region that neither client knows
//!   fetched-is-stored            ... by this client, or its parent before the fork; by nobody else since
//!   spare-is-spare               a server is given up early only if others have its pages, or know better
//! ```

mod plan;
mod server;
mod world;

pub use plan::{Faults, Plan};
pub use world::{Tally, World};

/// Runs one seed; panics where an invariant is broken.
#[must_use]
pub fn run(plan: Plan) -> Tally {
    World::new(plan).run()
}
