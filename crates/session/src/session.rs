//! The conversation with one server: what waits to leave, what waits for an answer, and what a broken
//! connection, a silent server or an odd answer means.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use rampool_paging::placement::ServerIndex;
use rampool_wire::frame::REMEMBERED;
use rampool_wire::frame::{Header, LeaseId, MemberId, Opcode, RegionId, Status};
use rampool_wire::session::Credits;
use rampool_wire::units::{OS_PAGE_BYTES, PageIndex};

use crate::hedge::Promptness;
use crate::io::{
    Ask, Breach, Break, CLASSES, Class, Failed, Grant, LinkId, Lost, Output, RequestId, SENT_TOGETHER_BYTES,
    Time, What,
};
use crate::rule::Rule;
use crate::work::{Orphaned, Phase, Request, Work};

/// Bytes of page data that prefetches and write-backs may each have outstanding: what a demand request, or
/// its answer, may have to wait behind. A window each, because they travel in opposite directions.
pub const BULK_WINDOW_BYTES: u64 = 512 << 10;
/// Bytes in the link above which prefetches and write-backs wait here: what is in the link was checksummed
/// already.
pub const LINK_QUEUE_BYTES: usize = 128 << 10;
/// A server that answers nothing is lost after one deadline; one that answers others, but never this one,
/// after so many.
pub const DEADLINES: u32 = 8;
/// A server that seems to have passed a deadline is listened to once more for this long: it may be this
/// process that had no time to send or to look.
pub const LAST_CHANCE: Duration = Duration::from_secs(2);
/// Connections that break one after the other, without an answer in between, before the server is lost.
pub const MAX_BREAKS: u32 = 8;
/// One attempt to connect may take this long: the kernel repeats a lost packet of it after a second.
pub const ATTEMPT: Duration = Duration::from_millis(2500);
/// The pause after an attempt that failed.
pub const PAUSE: Duration = Duration::from_millis(100);
/// A server is absent after so much silence, and a quarter more to listen once more, or after so long without
/// a connection, where every page that it holds has another holder: 150 ms in all. Stores wait no longer for
/// it.
pub const SPARE_SILENCE: Duration = Duration::from_millis(120);
/// ... or after the time of the slowest of late answers so many times, but not longer than this.
const SPARE_SLOWEST: u32 = 8;
pub const MOST_SPARE_SILENCE: Duration = Duration::from_secs(1);
/// An absent server that is not back after so long is lost.
pub const ABSENCE: Duration = Duration::from_secs(60);
/// After this much silence, at least, requests for pages turn to the other holders. They come back with the
/// first answer.
pub const SUSPICION: Duration = Duration::from_millis(20);
/// ... and after the time of the slowest of late answers so many times.
const SLOWEST: u32 = 4;
/// A client that has just joined a server that drains may have something to take over there.
const SETTLED: Duration = Duration::from_millis(500);
/// The number of the request that makes a client a member again; no other request has it.
pub const ATTACH_NUMBER: u64 = u64::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Up,
    /// The connection broke: the next attempt begins when it is due.
    Pausing,
    Connecting,
    Attaching,
    Lost(Lost),
}

/// Who the client is at a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Identity {
    lease: LeaseId,
    member: MemberId,
    run: u64,
    grace: Duration,
}

/// What went on, for statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    pub refused: u64,
    pub damaged: u64,
    pub reconnects: u64,
}

/// The conversation with one server.
#[derive(Debug)]
pub struct Session {
    server: ServerIndex,
    state: State,
    /// Of this connection, or of the latest attempt.
    connection: u32,
    identity: Option<Identity>,
    reconnects: bool,
    /// Every page that the server holds has another holder that is there: all of these know all regions; they
    /// are there; some pages have one.
    spare: bool,
    is_kept: bool,
    paired: bool,
    /// It may have missed something.
    behind: bool,
    /// While reconnecting: since when; when this step has failed, or the pause is over.
    broke_at: Time,
    /// The same, but for time in which this process did nothing or others had not all of the pages.
    spare_at: Time,
    due: Time,
    /// While reconnecting: when the time was looked at last.
    looked: Time,
    /// It is absent: nothing is sent there, and what it misses is noted. That ends when it is attached again.
    absent: bool,
    /// It is joined anew, and has nothing of what it had before.
    renewed: bool,
    /// It ends soon, and holds no new pages.
    draining: bool,
    joined_at: Time,
    /// The request that takes leave of it.
    leaving: Option<u64>,
    /// Regions that were freed meanwhile.
    free_later: Vec<RegionId>,
    /// It is silent: requests for pages go elsewhere if they can.
    suspect: bool,
    /// Since when it has been silent for too long, and when that was looked at last.
    silent: Option<(Time, Time)>,
    /// How long late answers took.
    slowest: Duration,
    pub(crate) promptness: Promptness,
    /// Numbers of requests that went elsewhere while their answer is out, with their bytes and class.
    moved: BTreeMap<u64, (u64, Class)>,
    /// Connections that broke since the last answer.
    breaks: u32,
    /// Since when a deadline has been over, and when that was looked at last.
    overdue: Option<(Time, Time)>,
    credits: Credits,
    max_requests: u32,
    max_bytes: u64,
    bulk_bytes: [u64; CLASSES],
    queues: [VecDeque<RequestId>; CLASSES],
    /// Numbers of sent requests with the time, oldest first; some ended meanwhile.
    outstanding: VecDeque<(u64, Time)>,
    /// Stores, discards and the like that are queued or unanswered.
    write_backs: u32,
    /// The request that makes a region and has no answer yet.
    making: Option<u64>,
    /// Bytes that wait in the link.
    waiting: usize,
    op_deadline: Duration,
    heartbeat: Option<Duration>,
    last_sent: Time,
    last_progress: Time,
    /// When a head or the bytes of an answer came last.
    last_heard: Time,
    drained: bool,
    /// Whether something may have become free to leave.
    pub(crate) stirred: bool,
    pub(crate) counts: Counts,
}

impl Session {
    /// A session over a connection that is there. One request at a time may leave until the first grant.
    pub(crate) fn new(server: ServerIndex, op_deadline: Duration, now: Time) -> Self {
        Self {
            server,
            state: State::Up,
            connection: 0,
            identity: None,
            reconnects: false,
            spare: false,
            is_kept: false,
            paired: false,
            behind: false,
            broke_at: now,
            spare_at: now,
            due: now,
            looked: now,
            absent: false,
            renewed: false,
            draining: false,
            joined_at: now,
            leaving: None,
            free_later: Vec::new(),
            suspect: false,
            silent: None,
            slowest: Duration::ZERO,
            promptness: Promptness::default(),
            moved: BTreeMap::new(),
            breaks: 0,
            overdue: None,
            credits: Credits::new(1, 0),
            max_requests: 1,
            max_bytes: 0,
            bulk_bytes: [0; CLASSES],
            queues: std::array::from_fn(|_| VecDeque::new()),
            outstanding: VecDeque::new(),
            write_backs: 0,
            making: None,
            waiting: 0,
            op_deadline,
            heartbeat: None,
            last_sent: now,
            last_progress: now,
            last_heard: now,
            drained: true,
            stirred: false,
            counts: Counts::default(),
        }
    }

    /// A session that has no connection yet, and is to join as soon as the server can be reached.
    pub(crate) fn absent(server: ServerIndex, op_deadline: Duration, now: Time) -> Self {
        Self { state: State::Pausing, absent: true, reconnects: true, ..Self::new(server, op_deadline, now) }
    }

    /// Joins the server anew, after it was lost: as another member, of another lease, perhaps of another run
    /// of it.
    pub(crate) fn renew(&mut self, work: &Work, now: Time) {
        let mut anew = Self::absent(self.server, self.op_deadline, now);
        (anew.renewed, anew.due, anew.counts) = (true, now + PAUSE, self.counts);
        if work.rules.keep(Rule::RenewedNumbersGoOn) {
            anew.connection = self.connection;
        }
        if !work.rules.keep(Rule::RenewedIsAnother) {
            anew.identity = self.identity;
        }
        *self = anew;
    }

    pub(crate) fn renamed(&mut self, server: ServerIndex) {
        self.server = server;
    }

    /// The connection, while there is one.
    #[must_use]
    pub fn link(&self) -> Option<LinkId> {
        (self.state == State::Up).then_some(self.attempt())
    }

    pub(crate) fn attempt(&self) -> LinkId {
        LinkId { server: self.server, connection: self.connection }
    }

    /// Whether this is the connection, or the attempt, that counts.
    fn is_current(&self, link: LinkId, work: &Work) -> bool {
        link.connection == self.connection || !work.rules.keep(Rule::CurrentConnection)
    }

    #[must_use]
    pub fn lost(&self) -> Option<Lost> {
        if let State::Lost(reason) = self.state { Some(reason) } else { None }
    }

    /// Whether it is out of use until it is attached again. Other servers have all of its pages.
    #[must_use]
    pub fn is_absent(&self) -> bool {
        self.absent
    }

    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// Whether it drains, and may be taken leave of: not before this client has had time to take something
    /// over there.
    pub(crate) fn may_leave(&self, now: Time) -> bool {
        let joined = self.identity.is_some() && now >= self.joined_at + SETTLED;
        self.draining && self.state == State::Up && joined && self.leaving.is_none()
    }

    /// When it may be, if that is to come.
    pub(crate) fn settled_at(&self, now: Time) -> Option<Time> {
        Some(self.joined_at + SETTLED).filter(|at| *at > now && self.state == State::Up)
    }

    /// Whether it is being taken leave of.
    pub(crate) fn leaves(&self) -> bool {
        self.leaving.is_some()
    }

    pub(crate) fn leaving(&mut self, work: &Work, id: RequestId) {
        self.leaving = Some(work.number(id));
    }

    /// Whether it takes part in what changes pages.
    #[must_use]
    pub fn takes_part(&self) -> bool {
        !self.absent && self.lost().is_none()
    }

    /// Regions to free, now that it is back.
    pub(crate) fn take_freed(&mut self) -> Vec<RegionId> {
        if self.absent { Vec::new() } else { std::mem::take(&mut self.free_later) }
    }

    /// Who this client is there, once a lease was granted.
    #[must_use]
    pub fn member(&self) -> MemberId {
        self.identity.map_or(MemberId(0), |identity| identity.member)
    }

    #[must_use]
    pub fn op_deadline(&self) -> Duration {
        self.op_deadline
    }

    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Requests that are queued, those that are outstanding, and the bytes of credit of the latter.
    #[must_use]
    pub fn load(&self) -> (usize, u32, u64) {
        let (requests, bytes) = self.credits.outstanding();
        (self.queues.iter().map(VecDeque::len).sum(), requests, bytes)
    }

    /// Whether stores or discards are queued or unanswered.
    #[must_use]
    pub fn has_write_backs(&self) -> bool {
        self.write_backs > 0
    }

    /// Pages that one request may carry.
    #[must_use]
    pub fn max_pages(&self, limit: u32) -> u32 {
        let by_credit = u32::try_from(self.max_bytes / OS_PAGE_BYTES as u64).unwrap_or(u32::MAX);
        limit.min(by_credit).max(1)
    }

    pub(crate) fn granted(&mut self, grant: &Grant, work: &Work, now: Time) {
        self.joined_at = now;
        let identity =
            Identity { lease: grant.lease, member: grant.member, run: grant.run, grace: grant.grace };
        self.identity = Some(identity);
        self.max_requests = grant.max_requests;
        if work.rules.keep(Rule::Remembered) {
            self.max_requests = self.max_requests.min(u32::try_from(REMEMBERED).expect("a few hundred"));
        }
        self.max_bytes = grant.max_bytes.into();
        let requests = if work.rules.keep(Rule::RequestCredits) { self.max_requests } else { u32::MAX };
        let bytes = if work.rules.keep(Rule::ByteCredits) { grant.max_bytes } else { u32::MAX };
        self.credits = Credits::new(requests, bytes);
        // Half the interval: a beat that is late still is in time.
        self.heartbeat = Some(grant.heartbeat / 2).filter(|every| !every.is_zero());
        self.stirred = true;
    }

    pub(crate) fn set_reconnects(&mut self, reconnects: bool) {
        self.reconnects = reconnects;
    }

    /// Whether it can be done without for a while, whether the run goes on if it is lost, whether some of its
    /// pages have another holder, and whether it has missed some.
    pub(crate) fn set_spare(&mut self, spare: bool, is_kept: bool, paired: bool, behind: bool, now: Time) {
        if spare && !self.spare && !self.absent {
            self.spare_at = now;
        }
        (self.spare, self.is_kept, self.paired, self.behind) = (spare, is_kept, paired, behind);
    }

    /// Whether it is absent, and what only it has is waited for.
    pub(crate) fn is_awaited(&self, work: &Work, now: Time) -> bool {
        let gone = now >= self.awaited_until() && work.rules.keep(Rule::GoneIsNotAwaited);
        // One that is joined anew brings nothing.
        let brings = !self.renewed || !work.rules.keep(Rule::RenewedIsNotAwaited);
        self.absent && brings && !gone && work.rules.keep(Rule::OnlyHolderIsAwaited)
    }

    fn awaited_until(&self) -> Time {
        self.spare_at + self.awaited()
    }

    /// For how long an absent server is waited for.
    fn awaited(&self) -> Duration {
        self.identity.map_or(self.op_deadline, |of| of.grace.min(self.op_deadline))
    }

    /// The request waits until the server is back.
    pub(crate) fn waits(&mut self, work: &mut Work, id: RequestId) {
        work.renumber(id);
        work.set_phase(id, Phase::Queued);
        let request = work.get_mut(id);
        (request.asked_again, request.departed) = (false, false);
        self.queues[request.ask.class as usize].push_back(id);
    }

    /// Whether it is worth asking for a page that another server holds as well.
    pub(crate) fn is_well(&self) -> bool {
        self.state == State::Up && !self.suspect
    }

    /// The same, and that it answers in time: the most is the best.
    pub(crate) fn preference(&self, work: &Work) -> u8 {
        let slow = self.promptness.is_slow() && work.rules.keep(Rule::SlowIsAvoided);
        if self.is_well() { 2 - u8::from(slow) } else { 0 }
    }

    /// Whether a read of so many bytes leaves as soon as it is asked for.
    pub(crate) fn takes_at_once(&self, bytes: u64) -> bool {
        let (requests, taken) = self.credits.outstanding();
        let queued = [Class::Control, Class::Demand].iter().any(|of| !self.queues[*of as usize].is_empty());
        self.is_well() && !queued && requests < self.max_requests && taken + bytes <= self.max_bytes
    }

    /// The read that was sent longest ago, and when. None: what it said may lie there unread.
    pub(crate) fn oldest_read(&self, work: &Work) -> Option<(RequestId, Time)> {
        let mut reads = self.promptness.reads.iter();
        let oldest = reads.find_map(|(number, at)| Some((work.sent(*number)?, *at)));
        oldest.filter(|_| self.state == State::Up && self.drained)
    }

    /// This read, and what was sent before it, does not turn to another server any more.
    pub(crate) fn forget_reads(&mut self, work: &Work, id: RequestId) {
        let number = work.number(id);
        while self.promptness.reads.pop_front().is_some_and(|(of, _)| of != number) {}
    }

    /// Queues a request that was submitted. In a lost session it ends at once.
    pub(crate) fn enqueue(&mut self, work: &mut Work, id: RequestId) {
        if let State::Lost(reason) = self.state {
            work.orphans.push_back((id, Orphaned::Lost(reason)));
            return;
        }
        if self.absent {
            self.leave_later(work, id);
            work.orphans.push_back((id, Orphaned::Lost(Lost::Connection)));
            return;
        }
        let Ask { class, piece, .. } = work.get(id).ask;
        self.write_backs += u32::from(class == Class::WriteBack && piece.is_none());
        self.queues[class as usize].push_back(id);
        self.stirred = true;
    }

    /// What an absent server is told when it is back.
    fn leave_later(&mut self, work: &Work, id: RequestId) {
        let Ask { opcode, region, .. } = work.get(id).ask;
        let rule = match opcode {
            Opcode::FreeRegion => Rule::FreesLater,
            Opcode::AdoptRegion => Rule::FreesWhatMayBeTaken,
            _ => return,
        };
        if region.0 != 0 && work.rules.keep(rule) {
            self.free_later.push(region);
        }
    }

    // --- Sending
    // ---------------------------------------------------------------------------------------------------

    /// The next request that may leave.
    pub(crate) fn next_to_send(&mut self, work: &mut Work, now: Time) -> Option<Output> {
        if !self.stirred || self.state != State::Up {
            return None;
        }
        let Some(request) = self.next_allowed(work) else {
            self.stirred = false;
            return None;
        };
        let number = work.number(request);
        work.set_phase(request, Phase::Sent);
        if work.get(request).makes_region() {
            self.making = Some(number);
        }
        self.outstanding.push_back((number, now));
        if work.get(request).is_paired_read() && !work.get(request).turned {
            self.promptness.reads.push_back((number, now));
        }
        self.last_sent = now;
        Some(Output::Send { link: self.attempt(), request, number })
    }

    /// Takes the next request off the queues if its credits are there.
    fn next_allowed(&mut self, work: &Work) -> Option<RequestId> {
        let mut order = [Class::Control, Class::Demand, Class::Prefetch, Class::WriteBack];
        if !work.rules.keep(Rule::ControlFirst) {
            order.rotate_left(1);
        }
        if !work.rules.keep(Rule::DemandFirst) {
            order.swap(1, 2);
        }
        for class in order {
            let Some(id) = self.queues[class as usize].front().copied() else { continue };
            let request = work.get(id);
            let bytes = request.ask.bytes;
            let waits =
                request.makes_region() && self.making.is_some() && work.rules.keep(Rule::OneRegionAtATime);
            match class {
                Class::Control => {
                    if waits {
                        continue;
                    }
                    if !self.credits.take(bytes) {
                        return None;
                    }
                }
                Class::Demand => {
                    if waits || (request.carries() && self.waiting >= SENT_TOGETHER_BYTES) {
                        return None;
                    }
                    if request.changes_bytes()
                        && self.is_being_read(work, request.ask.region, request.ask.span)
                    {
                        return None;
                    }
                    if !self.credits.take(bytes) {
                        return None;
                    }
                }
                Class::Prefetch | Class::WriteBack => {
                    let window = &self.bulk_bytes[class as usize];
                    let in_window = *window == 0 || *window + bytes <= BULK_WINDOW_BYTES;
                    if !in_window && work.rules.keep(Rule::BulkWindow) {
                        continue;
                    }
                    if self.waiting >= LINK_QUEUE_BYTES
                        || !self.leaves_spare(work, bytes)
                        || !self.credits.take(bytes)
                    {
                        return None;
                    }
                    self.bulk_bytes[class as usize] += bytes;
                }
            }
            self.queues[class as usize].pop_front();
            return Some(id);
        }
        None
    }

    /// Whether enough credits stay for what a thread waits for; the first request may take all.
    fn leaves_spare(&self, work: &Work, bytes: u64) -> bool {
        let (requests, taken) = self.credits.outstanding();
        let (spare_requests, spare_bytes) = (self.max_requests / 8, self.max_bytes / 8);
        requests == 0
            || (requests + spare_requests < self.max_requests
                && taken + bytes + spare_bytes <= self.max_bytes)
            || !work.rules.keep(Rule::SpareCredits)
    }

    /// Whether an unanswered request reads some of these bytes: after a break it is asked again, and would
    /// read what was changed since.
    fn is_being_read(&self, work: &Work, region: RegionId, (low, high): (u64, u64)) -> bool {
        work.rules.keep(Rule::ReadsBeforeChanges)
            && self.outstanding.iter().any(|(number, _)| {
                work.find(*number).is_some_and(|id| {
                    let request = work.get(id);
                    let (from, to) = request.ask.span;
                    request.reads_bytes() && request.ask.region == region && from < high && low < to
                })
            })
    }

    pub(crate) fn queued(&mut self, link: LinkId, waiting: usize) {
        if self.link() == Some(link) {
            self.waiting = waiting;
        }
    }

    #[inline]
    pub(crate) fn written(&mut self, link: LinkId, waiting: usize, now: Time) {
        if self.link() == Some(link) {
            if waiting < self.waiting {
                self.last_progress = now;
                self.stirred = true;
            }
            self.waiting = waiting;
        }
    }

    // --- Answers
    // ---------------------------------------------------------------------------------------------------

    /// A head with its table has arrived.
    /// The request that it answers although that went elsewhere.
    pub(crate) fn head(
        &mut self,
        work: &mut Work,
        link: LinkId,
        header: &Header,
        now: Time,
    ) -> Option<RequestId> {
        if self.state != State::Up || !self.is_current(link, work) {
            return None;
        }
        (self.last_progress, self.last_heard) = (now, now);
        work.well_again |= self.suspect;
        (self.suspect, self.silent) = (false, None);
        if header.is_reply()
            && let Some(moved) = self.moved.remove(&header.request)
        {
            return self.late_answer(work, link, header, moved, now);
        }
        if let Err(reason) = self.judge(work, link, header, now) {
            self.lose(work, reason);
        }
        None
    }

    /// The answer to a request that went elsewhere counts if it comes first.
    fn late_answer(
        &mut self,
        work: &mut Work,
        link: LinkId,
        header: &Header,
        (bytes, class): (u64, Class),
        now: Time,
    ) -> Option<RequestId> {
        let opcode = header.opcode;
        if opcode != Opcode::Get {
            self.lose(work, Lost::Breach(Breach::OtherOperation { answered: opcode, asked: Opcode::Get }));
            return None;
        }
        if class == Class::Demand {
            self.promptness.answered(self.sent_at(header.request, now), now);
        }
        let counts = header.status == Status::Ok && work.rules.keep(Rule::FirstAnswerCounts);
        let first = work.moved(header.request).filter(|_| counts);
        if first.is_some() {
            return first;
        }
        self.give_back(bytes, class);
        if header.bulk_len > 0 {
            work.outputs.push_back(Output::Drop { link });
        }
        if self.gives_up(work, header.status) {
            self.lose(work, Lost::GivenUp);
        }
        None
    }

    /// When what is answered now was sent.
    fn sent_at(&self, number: u64, now: Time) -> Time {
        self.outstanding.iter().find(|(sent, _)| *sent == number).map_or(now, |(_, at)| *at)
    }

    /// A request is this one's again, whose answer has come under the number that it had before.
    pub(crate) fn answers(&mut self, work: &mut Work, link: LinkId, id: RequestId, before: u64) {
        let number = work.number(id);
        self.outstanding.iter_mut().filter(|(sent, _)| *sent == before).for_each(|of| of.0 = number);
        work.set_phase(id, Phase::Receiving);
        work.outputs.push_back(Output::Receive { link, request: id });
    }

    fn judge(&mut self, work: &mut Work, link: LinkId, header: &Header, now: Time) -> Result<(), Lost> {
        let breach = |breach| Err(Lost::Breach(breach));
        let (opcode, number) = (header.opcode, header.request);
        if !header.is_reply() {
            if opcode == Opcode::Draining && header.bulk_len == 0 && work.rules.keep(Rule::DrainingWorks) {
                work.outputs.push_back(Output::Draining { server: self.server, left_ms: header.arg });
                work.changed |= !std::mem::replace(&mut self.draining, true);
                return Ok(());
            }
            return breach(Breach::Asks(opcode));
        }
        let Some(id) = work.sent(number) else {
            return breach(Breach::NothingAsked(opcode));
        };
        let request = *work.get(id);
        if request.ask.server != self.server && work.rules.keep(Rule::OwnServer) {
            return breach(Breach::NothingAsked(opcode));
        }
        if request.ask.opcode != opcode && work.rules.keep(Rule::OwnOperation) {
            return breach(Breach::OtherOperation { answered: opcode, asked: request.ask.opcode });
        }
        if self.paired {
            let sent = self.sent_at(number, now);
            self.slowest = (self.slowest - self.slowest / 64).max(now - sent);
            if request.is_paired_read() {
                self.promptness.answered(sent, now);
            }
        }
        let ok = header.status == Status::Ok;
        let reads = ok && matches!(opcode, Opcode::Get | Opcode::Gather | Opcode::ReadPiece | Opcode::Scan);
        if header.bulk_len > 0 && !reads {
            return breach(Breach::CarriesPages(opcode));
        }
        if reads && (opcode != Opcode::Scan || header.bulk_len > 0) {
            work.set_phase(id, Phase::Receiving);
            work.outputs.push_back(Output::Receive { link, request: id });
            return Ok(());
        }
        if request.carries() && !request.departed && work.rules.keep(Rule::DepartedFirst) {
            return breach(Breach::TooEarly);
        }
        if self.gives_up(work, header.status) {
            return Err(Lost::GivenUp);
        }
        if self.identity.is_some() && header.status == Status::OverCredit {
            return breach(Breach::OverCredit);
        }
        if header.status == Status::PoolFull && opcode == Opcode::Put && request.ask.other.is_some() {
            self.counts.refused += 1;
            self.breaks = 0;
            self.forget_sent(work, id);
            self.write_backs -= 1;
            work.orphans.push_back((id, Orphaned::Full(header.arg)));
            return Ok(());
        }
        if ok && self.behind {
            self.repair(work, id);
        }
        let wanted = request.ask.wanted && (ok || request.ask.op.is_none());
        let refused = !ok && !wanted;
        work.outputs.push_back(Output::Answered { link, request: id, number, wanted, refused });
        if let Some(piece) = request.ask.piece {
            work.steps.push_back((piece, ok.then_some(RegionId(header.region))));
        }
        if refused {
            self.counts.refused += 1;
            if let Some(op) = request.ask.op {
                match (header.status, request.ask.copy_to) {
                    (Status::PoolFull, Some(server)) => work.op_full(op, server, header.arg),
                    (Status::PoolFull | Status::LimitReached, _) if request.is_store() => {
                        work.op_full(op, self.server, header.arg);
                    }
                    (status, _) => work.op_denied(op, self.server, request.what(), status),
                }
            }
        }
        self.end_request(work, id);
        if self.leaving == Some(number) { Err(Lost::Drained) } else { Ok(()) }
    }

    /// Whether the server says that it has given this member up.
    fn gives_up(&self, work: &Work, status: Status) -> bool {
        let gone = matches!(status, Status::MemberGone | Status::NoSuchLease);
        gone && self.identity.is_some() && work.rules.keep(Rule::GivenUp)
    }

    /// What the server has changed, it has missed no longer, unless others hold it since, where it may have
    /// changed.
    fn repair(&self, work: &mut Work, id: RequestId) {
        let Request { ask: Ask { opcode, of, piece, .. }, turn, .. } = *work.get(id);
        let changes = matches!(opcode, Opcode::Put | Opcode::Discard) && piece.is_none();
        let same_holders = turn == work.turns;
        if changes && same_holders && work.rules.keep(Rule::StoreRepairs) {
            let pages = std::mem::take(&mut work.pages[id.0 as usize]);
            work.repairs.push((self.server, of, pages));
        }
    }

    /// All bytes of an answer are in their places.
    pub(crate) fn body(
        &mut self,
        work: &mut Work,
        link: LinkId,
        id: RequestId,
        damaged: Option<PageIndex>,
        now: Time,
    ) {
        if self.link() != Some(link) || work.phase(id) != Phase::Receiving {
            return;
        }
        (self.last_progress, self.last_heard) = (now, now);
        let request = *work.get(id);
        if let Some(page) = damaged {
            self.counts.damaged += 1;
            let once = !request.asked_again || !work.rules.keep(Rule::AskAgainOnce);
            if once && work.rules.keep(Rule::AskAgain) {
                return self.ask_again(work, id);
            }
            if request.ask.other.is_some() || request.ask.piece.is_some() {
                self.forget_sent(work, id);
                work.orphans.push_back((id, Orphaned::Damaged(page)));
                return;
            }
            if let Some(op) = request.ask.op.filter(|_| !request.ask.wanted) {
                work.op_corrupt(op, self.server, page);
            } else {
                return self.lose(work, Lost::Breach(Breach::DamagedTwice(request.ask.opcode)));
            }
        }
        let number = work.number(id);
        let wanted = request.ask.wanted && damaged.is_none();
        if let Some(piece) = request.ask.piece {
            work.steps.push_back((piece, Some(RegionId(0))));
        } else if request.ask.class == Class::Demand && request.ask.opcode == Opcode::Get {
            work.pace.answered(request.made_at, now);
        }
        work.outputs.push_back(Output::Answered { link, request: id, number, wanted, refused: false });
        self.end_request(work, id);
    }

    /// Puts a request back to the front of its queue, under a new number: the answer to come is another one.
    fn ask_again(&mut self, work: &mut Work, id: RequestId) {
        self.forget_sent(work, id);
        work.renumber(id);
        work.set_phase(id, Phase::Queued);
        let request = work.get_mut(id);
        request.asked_again = true;
        request.departed = false;
        self.queues[request.ask.class as usize].push_front(id);
    }

    /// A request that was sent, and is not any more.
    fn forget_sent(&mut self, work: &Work, id: RequestId) {
        let Ask { bytes, class, .. } = work.get(id).ask;
        self.give_back(bytes, class);
        let number = work.number(id);
        self.outstanding.retain(|(sent, _)| *sent != number);
    }

    fn end_request(&mut self, work: &mut Work, id: RequestId) {
        self.breaks = 0;
        let Ask { bytes, class, .. } = work.get(id).ask;
        self.give_back(bytes, class);
        let number = work.number(id);
        if self.outstanding.front().is_some_and(|(front, _)| *front == number) {
            self.outstanding.pop_front();
        }
        self.ended(work, id);
    }

    /// A request is under way no longer.
    fn ended(&mut self, work: &mut Work, id: RequestId) {
        let Ask { class, piece, .. } = work.get(id).ask;
        self.write_backs -= u32::from(class == Class::WriteBack && piece.is_none());
        if self.making == Some(work.number(id)) {
            self.making = None;
        }
        work.finish(id);
    }

    fn give_back(&mut self, bytes: u64, class: Class) {
        self.credits.give_back(bytes);
        if class >= Class::Prefetch {
            self.bulk_bytes[class as usize] -= bytes;
        }
        self.stirred = true;
    }

    pub(crate) fn drained(&mut self, link: LinkId, all: bool) {
        if self.link() == Some(link) {
            self.drained = all;
        }
    }

    // --- Time
    // ------------------------------------------------------------------------------------------------------

    /// Acts on what is due. What has arrived is to be told before.
    pub(crate) fn time(&mut self, work: &mut Work, now: Time) {
        match self.state {
            State::Up => self.time_up(work, now),
            State::Pausing | State::Connecting | State::Attaching => self.time_down(work, now),
            State::Lost(_) => {}
        }
    }

    fn time_up(&mut self, work: &mut Work, now: Time) {
        while let Some((number, _)) = self.outstanding.front() {
            if work.find(*number).is_some() || self.moved.contains_key(number) {
                break;
            }
            self.outstanding.pop_front();
        }
        if self.drained && self.paired {
            self.see_who_waits(work, now);
        }
        let reads = &mut self.promptness.reads;
        while reads.front().is_some_and(|(number, _)| work.sent(*number).is_none()) {
            reads.pop_front();
        }
        if self.oldest_due(work).is_some_and(|due| now >= due) {
            let chance = self.last_chance(work);
            let (mut since, looked) = self.overdue.unwrap_or((now, now));
            let held_up = now - looked > chance / 4 && !self.is_oldest_hopeless(now);
            if held_up && work.rules.keep(Rule::OwnPauses) {
                // This process did not listen meanwhile: the chance begins anew.
                since = now;
            }
            self.overdue = Some((since, now));
            if now >= since + chance && work.rules.keep(Rule::Deadline) {
                let silence = self.most_silence(work);
                if silence == self.op_deadline {
                    return self.lose(work, Lost::Deadline(silence));
                }
                if !self.has_more_than_pages(work) {
                    return self.be_absent(work, Lost::Deadline(silence), now);
                }
                let long = LAST_CHANCE.min(self.op_deadline / 4);
                if now >= self.last_heard + self.op_deadline && now >= since + long {
                    return self.lose(work, Lost::Deadline(self.op_deadline));
                }
            }
        } else {
            self.overdue = None;
        }
        self.watch_silence(work, now);
        let beats = self.heartbeat.is_some_and(|every| now >= self.last_sent + every);
        if beats && self.outstanding.is_empty() && work.rules.keep(Rule::Heartbeat) {
            let id = work.reserve();
            work.submit(id, Ask::control(self.server, Opcode::Heartbeat, RegionId(0)), now);
            self.enqueue(work, id);
        }
    }

    /// Reads that are late are so before their answers come.
    fn see_who_waits(&mut self, work: &Work, now: Time) {
        let Self { outstanding, promptness, moved, .. } = self;
        let is_read = |number: &u64| match moved.get(number) {
            Some((_, class)) => *class == Class::Demand,
            None => work.sent(*number).is_some_and(|id| work.get(id).is_paired_read()),
        };
        let known = promptness.known_until();
        let from = outstanding.partition_point(|(_, at)| *at <= known);
        let sent = outstanding.range(from..).filter(|(number, _)| is_read(number)).map(|(_, at)| *at);
        promptness.waits(sent, now);
    }

    /// Suspects a server that has been silent for longer than it ever was of late.
    fn watch_silence(&mut self, work: &mut Work, now: Time) {
        let timeout = self.timeout();
        let due = self.outstanding.front().map(|(_, sent)| (*sent).max(self.last_heard) + timeout);
        if !self.paired || self.suspect || due.is_none_or(|due| now < due) {
            self.silent = None;
            return;
        }
        let (mut since, looked) = self.silent.unwrap_or((now, now));
        if now - looked > timeout / 8 && work.rules.keep(Rule::OwnPauses) {
            since = now;
        }
        self.silent = Some((since, now));
        if now >= since + timeout / 4 && work.rules.keep(Rule::Suspicion) {
            (self.suspect, self.silent) = (true, None);
            self.turn_away(work);
        }
    }

    fn timeout(&self) -> Duration {
        (self.slowest * SLOWEST).clamp(SUSPICION, MOST_SPARE_SILENCE / 4)
    }

    /// Whether something is under way that no other server can do.
    fn has_more_than_pages(&self, work: &Work) -> bool {
        let sent = self.outstanding.iter().filter_map(|(number, _)| work.find(*number));
        let more = |id| {
            use Opcode::{AdoptRegion, CloneRegion, CreateRegion, Discard, FreeRegion, Get, Goodbye};
            use Opcode::{Heartbeat, Put, ResizeLease};
            !matches!(
                work.get(id).ask.opcode,
                Get | Put
                    | Discard
                    | CreateRegion
                    | CloneRegion
                    | AdoptRegion
                    | FreeRegion
                    | ResizeLease
                    | Heartbeat
                    | Goodbye
            )
        };
        sent.chain(self.queues.iter().flatten().copied()).any(more)
    }

    /// The requests for pages that another server holds as well are for the client to move, if it can.
    pub(crate) fn turn_away(&mut self, work: &mut Work) {
        if !work.rules.keep(Rule::ReadElsewhere) && self.state != State::Up {
            return;
        }
        for queue in &mut self.queues {
            queue.retain(|id| {
                let stays = work.get(*id).ask.other.is_none() || work.get(*id).ask.opcode != Opcode::Get;
                if !stays {
                    work.orphans.push_back((*id, Orphaned::Away));
                }
                stays
            });
        }
        for (number, _) in &self.outstanding {
            let Some(id) = work.sent(*number) else { continue };
            let Ask { opcode, other, .. } = work.get(id).ask;
            if opcode == Opcode::Get && other.is_some() {
                work.orphans.push_back((id, Orphaned::Away));
            }
        }
    }

    /// The client found another server for a request, which is not this one's any more.
    pub(crate) fn moves(&mut self, work: &Work, id: RequestId) {
        let Ask { bytes, class, .. } = work.get(id).ask;
        if work.phase(id) == Phase::Queued {
            self.queues[class as usize].retain(|queued| *queued != id);
        }
        if work.phase(id) == Phase::Sent && work.rules.keep(Rule::LateAnswer) {
            self.moved.insert(work.number(id), (bytes, class));
        } else if work.phase(id) == Phase::Sent {
            self.forget_sent(work, id);
        }
    }

    /// The client found none: the request stays.
    pub(crate) fn keeps(&mut self, work: &Work, id: RequestId) {
        if work.phase(id) == Phase::Queued {
            self.queues[work.get(id).ask.class as usize].push_back(id);
            self.stirred = true;
        }
    }

    fn last_chance(&self, work: &Work) -> Duration {
        let most = LAST_CHANCE.min(self.most_silence(work) / 4);
        if work.rules.keep(Rule::LastChance) { most } else { Duration::ZERO }
    }

    /// After so much silence the server is lost.
    fn most_silence(&self, work: &Work) -> Duration {
        let early = self.spare && self.reconnects && self.identity.is_some();
        if early || !work.rules.keep(Rule::OnlySpareEarly) {
            (self.slowest * SPARE_SLOWEST).clamp(SPARE_SILENCE, MOST_SPARE_SILENCE).min(self.op_deadline)
        } else {
            self.op_deadline
        }
    }

    /// Whether the oldest request has waited for so long that nothing excuses it.
    fn is_oldest_hopeless(&self, now: Time) -> bool {
        self.outstanding.front().is_some_and(|(_, sent)| now >= *sent + self.op_deadline * (2 * DEADLINES))
    }

    fn oldest_due(&self, work: &Work) -> Option<Time> {
        let (_, sent) = *self.outstanding.front()?;
        let progress = if work.rules.keep(Rule::Progress) { self.last_progress } else { sent };
        let silence = self.most_silence(work);
        let due = (sent.max(progress) + silence).min(sent + self.op_deadline * DEADLINES);
        // What leaves shows no more than that the way there is open.
        Some(if self.spare { due.min(sent.max(self.last_heard) + silence * 2) } else { due })
    }

    /// When [`Session::time`] has something to do at the latest.
    pub(crate) fn next_timeout(&self, work: &Work) -> Option<Time> {
        match self.state {
            State::Lost(_) => None,
            State::Pausing | State::Connecting | State::Attaching => {
                let limit = self.reconnect_limit(work);
                let since = if self.spare && !self.absent { self.spare_at } else { self.broke_at };
                let awaited = (self.absent && self.looked < self.awaited_until())
                    .then(|| self.awaited_until().min(self.looked + self.awaited() / 8));
                let due = awaited.map_or(self.due, |due| self.due.min(due));
                Some(due.min(since + limit).min(self.looked + limit / 8))
            }
            State::Up if !self.drained => Some(Time(0)),
            State::Up => {
                let beat = self
                    .heartbeat
                    .filter(|_| self.outstanding.is_empty())
                    .map(|every| self.last_sent + every);
                let overdue = self.overdue.map(|(since, looked)| {
                    let chance = self.last_chance(work);
                    (since + chance).min(looked + chance / 8)
                });
                let silent =
                    self.outstanding.front().filter(|_| self.paired && !self.suspect).map(|(_, sent)| {
                        let timeout = self.timeout();
                        let due = (*sent).max(self.last_heard) + timeout;
                        self.silent
                            .map_or(due, |(since, looked)| (since + timeout / 4).min(looked + timeout / 16))
                    });
                [overdue.or_else(|| self.oldest_due(work)), beat, silent].into_iter().flatten().min()
            }
        }
    }

    // --- Breaking and coming back
    // ----------------------------------------------------------------------------------

    /// The connection is of no use any more: makes it again, or gives the server up.
    pub(crate) fn down(&mut self, work: &mut Work, link: LinkId, why: Break, now: Time) {
        if self.link() != Some(link) {
            return;
        }
        self.breaks += 1;
        let often = self.breaks > MAX_BREAKS && work.rules.keep(Rule::BreakLimit);
        let long = self.op_deadline * DEADLINES;
        let is_old = |(number, _): &(u64, Time)| {
            work.find(*number).is_some_and(|id| now - work.get(id).made_at >= long)
        };
        // A request, however often it is repeated, does not wait for ever.
        let old = work.rules.keep(Rule::AgeLimit) && self.outstanding.iter().any(is_old);
        if self.identity.is_none() || !self.reconnects {
            return self.lose(work, Lost::Connection);
        }
        if why == Break::Final || often || old {
            return self.lose(work, Lost::Connection);
        }
        work.outputs.push_back(Output::Close { link });
        self.requeue(work);
        self.overdue = None;
        (self.suspect, self.silent) = (false, None);
        self.moved.clear();
        self.promptness.reads.clear();
        self.waiting = 0;
        self.drained = true;
        (self.broke_at, self.spare_at, self.looked) = (now, now, now);
        (self.state, self.due) = (State::Pausing, now);
        self.time_down(work, now);
        if self.lost().is_none() {
            self.turn_away(work);
        }
    }

    /// A connection that is not made again within this time is not made again.
    fn reconnect_limit(&self, work: &Work) -> Duration {
        if self.absent {
            return ABSENCE;
        }
        let grace = self.identity.map_or(Duration::ZERO, |identity| identity.grace);
        grace.min(self.most_silence(work))
    }

    /// What had no answer goes back to the front of its queue, in order and under its number: the server
    /// answers a connection's stores in the order in which they came and remembers updates and regions by
    /// their numbers.
    fn requeue(&mut self, work: &mut Work) {
        let mut unanswered = std::mem::take(&mut self.outstanding);
        if !work.rules.keep(Rule::ResendInOrder) {
            unanswered.make_contiguous().reverse();
        }
        while let Some((number, _)) = unanswered.pop_back() {
            let Some(id) = work.find(number) else { continue };
            if work.get(id).ask.opcode == Opcode::Heartbeat {
                self.ended(work, id);
                continue;
            }
            work.set_phase(id, Phase::Queued);
            work.get_mut(id).departed = false;
            if !work.rules.keep(Rule::SameNumber) {
                work.renumber(id);
            }
            self.queues[work.get(id).ask.class as usize].push_front(id);
        }
        self.outstanding = unanswered;
        self.making = None;
    }

    fn time_down(&mut self, work: &mut Work, now: Time) {
        let (limit, gap) = (self.reconnect_limit(work), now - self.looked);
        let most = if self.absent { self.awaited() } else { limit };
        if (self.spare || self.absent) && gap > most / 4 && work.rules.keep(Rule::OwnPausesDown) {
            // This process did nothing meanwhile.
            self.spare_at = self.spare_at + gap;
        }
        self.looked = now;
        let since = if self.spare && !self.absent { self.spare_at } else { self.broke_at };
        if now >= since + limit && work.rules.keep(Rule::ReconnectLimit) {
            let early = !self.absent && self.spare && self.reconnects;
            if early && !self.has_more_than_pages(work) {
                return self.be_absent(work, Lost::Connection, now);
            }
            let grace = self.identity.map_or(Duration::ZERO, |identity| identity.grace);
            if !early || now >= self.broke_at + grace.min(self.op_deadline) {
                return self.lose(work, Lost::Connection);
            }
        }
        if self.absent && now >= self.awaited_until() && work.rules.keep(Rule::GoneIsNotAwaited) {
            let waited = self.queues.iter_mut().flat_map(|queue| queue.drain(..));
            work.orphans.extend(waited.map(|id| (id, Orphaned::Lost(Lost::Connection))));
        }
        if now < self.due {
            return;
        }
        if self.state == State::Pausing {
            self.connection += 1;
            (self.state, self.due) = (State::Connecting, now + ATTEMPT);
            work.outputs.push_back(Output::Connect { link: self.attempt() });
        } else if work.rules.keep(Rule::AttemptLimit) {
            work.outputs.push_back(Output::Close { link: self.attempt() });
            self.pause(work, now);
        }
    }

    fn pause(&mut self, work: &Work, now: Time) {
        let pause = if work.rules.keep(Rule::AttemptPause) { PAUSE } else { Duration::ZERO };
        (self.state, self.due) = (State::Pausing, now + pause);
    }

    pub(crate) fn connected(&mut self, work: &mut Work, link: LinkId) {
        if self.state == State::Connecting && link == self.attempt() {
            self.state = State::Attaching;
            work.outputs.push_back(Output::Attach { link });
        }
    }

    pub(crate) fn failed(&mut self, work: &mut Work, link: LinkId, why: Failed, now: Time) {
        let trying = matches!(self.state, State::Connecting | State::Attaching);
        if !trying || link != self.attempt() {
            return;
        }
        match why {
            Failed::MayPass => self.pause(work, now),
            Failed::ForGood => {
                // There is nothing to close.
                self.state = State::Pausing;
                self.lose(work, Lost::Connection);
            }
        }
    }

    pub(crate) fn attached(
        &mut self,
        work: &mut Work,
        link: LinkId,
        header: &Header,
        grant: Option<Grant>,
        now: Time,
    ) {
        if self.state != State::Attaching || link != self.attempt() {
            return;
        }
        match self.judge_attached(work, header, grant) {
            Err(reason) => self.lose(work, reason),
            Ok(grant) => {
                self.state = State::Up;
                if std::mem::take(&mut self.absent) {
                    (self.slowest, self.renewed) = (Duration::ZERO, false);
                    self.promptness.forget();
                    work.outputs.push_back(Output::Returned { server: self.server });
                    work.changed = true;
                }
                work.well_again |= self.paired;
                self.counts.reconnects += 1;
                let (credits, bulk_bytes) = (self.credits.clone(), self.bulk_bytes);
                // What it has to take over, it has done without.
                self.granted(&grant, work, Time(0));
                self.bulk_bytes = [0; CLASSES];
                if !work.rules.keep(Rule::FreshCredits) {
                    (self.credits, self.bulk_bytes) = (credits, bulk_bytes);
                }
                (self.last_sent, self.last_progress, self.last_heard) = (now, now, now);
                work.outputs.push_back(Output::Back { link });
            }
        }
    }

    /// Whether the same run of the server takes this client for the member that it was.
    fn judge_attached(&self, work: &Work, header: &Header, grant: Option<Grant>) -> Result<Grant, Lost> {
        let joins = match header.opcode {
            Opcode::AttachLease => true,
            Opcode::OpenLease => self.renewed,
            _ => false,
        };
        let asked = header.is_reply() && header.request == ATTACH_NUMBER && joins;
        if !asked || header.bulk_len > 0 {
            return Err(Lost::Breach(Breach::NothingAsked(header.opcode)));
        }
        match header.status {
            Status::Ok => {}
            // Also a new run at the same address, which knows nothing of this lease.
            Status::NoSuchLease | Status::MemberGone => return Err(Lost::GivenUp),
            _ => return Err(Lost::Connection),
        }
        let grant = grant.ok_or(Lost::Breach(Breach::OddGrant))?;
        // One that joins late is who the server says.
        let first = Identity { lease: grant.lease, member: grant.member, run: grant.run, grace: grant.grace };
        let identity = self.identity.unwrap_or(first);
        if grant.run != identity.run && work.rules.keep(Rule::SameRun) {
            return Err(Lost::GivenUp);
        }
        let same_member = (grant.member == identity.member && grant.lease == identity.lease)
            || !work.rules.keep(Rule::SameMember);
        if !same_member {
            return Err(Lost::Breach(Breach::AnotherMember));
        }
        if !grant.is_usable() {
            return Err(Lost::Breach(Breach::NothingGranted));
        }
        Ok(grant)
    }

    /// Ends everything that this session had. The second time, nothing happens.
    pub(crate) fn lose(&mut self, work: &mut Work, reason: Lost) {
        if self.lost().is_none() {
            let during = self.end_all(work, State::Lost(reason), reason);
            // One that never was here takes nothing with it.
            let had_nothing =
                self.absent && self.identity.is_none() && work.rules.keep(Rule::NothingIsNotLost);
            let spare = self.is_kept || had_nothing;
            (self.absent, self.renewed, self.leaving) = (false, false, None);
            self.free_later.clear();
            work.outputs.push_back(Output::Lost { server: self.server, during, reason, spare });
        }
    }

    /// Goes on without this server until it can be reached again: other servers have all of its pages.
    fn be_absent(&mut self, work: &mut Work, reason: Lost, now: Time) {
        let during = self.end_all(work, State::Pausing, reason);
        (self.absent, self.leaving) = (true, None);
        (self.broke_at, self.spare_at, self.looked, self.due) = (now, now, now, now + PAUSE);
        (self.suspect, self.silent, self.overdue) = (false, None, None);
        (self.waiting, self.drained) = (0, true);
        work.outputs.push_back(Output::Absent { server: self.server, during, reason });
    }

    /// Ends the connection, and everything that this session had; what it was asked for longest.
    fn end_all(&mut self, work: &mut Work, state: State, reason: Lost) -> Option<What> {
        let was = std::mem::replace(&mut self.state, state);
        let close = Output::Close { link: self.attempt() };
        let closes = was != State::Pausing;
        // Before anything ends, and its memory is used for something else.
        if closes && work.rules.keep(Rule::CloseFirst) {
            work.outputs.push_back(close);
        }
        let sent = std::mem::take(&mut self.outstanding);
        let queues = std::mem::take(&mut self.queues);
        let sent = sent.iter().filter_map(|(number, _)| work.find(*number)).collect::<Vec<_>>();
        let all = || sent.iter().chain(queues.iter().flatten()).copied();
        let during = all().next().map(|id| work.get(id).what());
        all().for_each(|id| self.leave_later(work, id));
        work.orphans.extend(all().map(|id| (id, Orphaned::Lost(reason))));
        work.changed = true;
        (self.write_backs, self.making) = (0, None);
        self.moved.clear();
        during
    }

    /// # Panics
    /// If an invariant is broken.
    pub(crate) fn check(&self, work: &Work) {
        let lost = matches!(self.state, State::Lost(_));
        assert!(!lost || self.queues.iter().all(VecDeque::is_empty), "a lost session has requests");
        let ids = self.queues.iter().flatten();
        assert!(ids.clone().all(|id| work.phase(*id) == Phase::Queued), "what is queued waits");
        let live = self.outstanding.iter().filter_map(|(number, _)| work.find(*number));
        if self.state == State::Up {
            let (requests, bytes) = self.credits.outstanding();
            let taken: u64 = live.clone().map(|id| work.get(id).ask.bytes).sum();
            let (moved, moved_bytes) =
                self.moved.values().fold((0, 0), |(n, bytes), (of, _)| (n + 1, bytes + of));
            assert_eq!(
                (requests as usize, bytes),
                (live.count() + moved, taken + moved_bytes),
                "credits are what is outstanding"
            );
        }
    }
}
