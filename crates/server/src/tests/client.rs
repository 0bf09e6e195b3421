//! A plain blocking client for tests: one request at a time, everything checked.

use rampool_net::transport::{
    Endpoint, Link, LinkError, LocalPolicy, Piece, PieceMut, Received, Urgency, connect,
};
use rampool_wire::frame::{
    AttachLease, Granted, Header, MemberId, Opcode, OpenLease, PageEntry, RegionId, Status, encode_extents,
    encode_frame, encode_put, page_crc, parse_get_reply, parse_message,
};
use rampool_wire::session::{Encryption, features};
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::time::{Duration, Instant};

pub const DEADLINE: Duration = Duration::from_secs(30);

pub struct Client {
    pub link: Link,
    next: u64,
    pub granted: Option<Granted>,
    /// Frames of the server's own that came in between.
    pub unasked: Vec<Header>,
}

pub struct Reply {
    pub header: Header,
    pub table: Vec<u8>,
    pub bulk: Vec<u8>,
}

/// What the server said instead of yes.
#[derive(Debug, PartialEq, Eq)]
pub struct No {
    pub status: Status,
    pub arg: u64,
    pub message: String,
}

pub fn policy(key: Option<&rampool_net::key::Key>, encryption: Encryption) -> LocalPolicy {
    LocalPolicy { key: key.cloned(), encryption, features: features::LZ4 | features::RINGS, ucx: None }
}

pub fn open_policy() -> LocalPolicy {
    policy(None, Encryption::Auto)
}

impl Client {
    pub fn new(endpoint: &Endpoint, policy: LocalPolicy) -> Self {
        Self::over(connect(endpoint, policy, Instant::now() + DEADLINE).unwrap())
    }

    pub fn over(link: Link) -> Self {
        Self { link, next: 1, granted: None, unasked: Vec::new() }
    }

    pub fn with_lease(endpoint: &Endpoint, policy: LocalPolicy, bytes: u64) -> Self {
        let mut client = Self::new(endpoint, policy);
        client.open(bytes).unwrap();
        client
    }

    pub fn open(&mut self, bytes: u64) -> Result<(), No> {
        let open = OpenLease { bytes, pid: std::process::id(), name: "test".into(), host: "here".into() };
        let reply = self.call(Opcode::OpenLease, |h| h, &open.encode())?;
        self.granted = Some(Granted::parse(&reply.table).unwrap());
        Ok(())
    }

    pub fn attach(&mut self, to: &Granted, member: MemberId) -> Result<(), No> {
        let attach = AttachLease {
            lease: to.lease,
            token: to.token,
            member,
            pid: std::process::id(),
            name: "child".into(),
            host: "here".into(),
        };
        let reply = self.call(Opcode::AttachLease, |h| h, &attach.encode())?;
        self.granted = Some(Granted::parse(&reply.table).unwrap());
        Ok(())
    }

    pub fn granted(&self) -> &Granted {
        self.granted.as_ref().unwrap()
    }

    /// A request with a table and no pages.
    pub fn call(
        &mut self,
        opcode: Opcode,
        with: impl FnOnce(Header) -> Header,
        table: &[u8],
    ) -> Result<Reply, No> {
        let request = self.number();
        let mut head = Vec::new();
        encode_frame(&mut head, with(Header::request(opcode, request)), table, 0);
        self.link.send_head(Urgency::Demand, &head, ());
        self.reply(request).unwrap()
    }

    pub fn create_region(&mut self) -> Result<RegionId, No> {
        self.call(Opcode::CreateRegion, |h| h, &[]).map(|r| RegionId(r.header.region))
    }

    pub fn region_call(&mut self, opcode: Opcode, region: RegionId) -> Result<RegionId, No> {
        self.call(opcode, |h| h.with_region(region), &[]).map(|r| RegionId(r.header.region))
    }

    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Puts pages from `first` on; all-zero ones travel as zero pages, `pack` makes the others travel packed.
    pub fn put(&mut self, region: RegionId, first: u64, pages: &[Vec<u8>], pack: bool) -> Result<(), No> {
        let (mut entries, mut bulk) = (Vec::new(), Vec::new());
        for page in pages {
            if page.iter().all(|b| *b == 0) {
                entries.push(PageEntry::ZERO);
                continue;
            }
            let packed = if pack { lz4_flex::block::compress(page) } else { page.clone() };
            let bytes = if packed.len() < OS_PAGE_BYTES { &packed } else { page };
            entries.push(PageEntry { crc: page_crc(page), len: u32::try_from(bytes.len()).unwrap() });
            bulk.extend_from_slice(bytes);
        }
        let request = self.number();
        let mut head = Vec::new();
        let extent = Extent::new(PageIndex(first), u32::try_from(pages.len()).unwrap());
        encode_put(&mut head, Header::request(Opcode::Put, request).with_region(region), &[extent], &entries);
        // SAFETY: `bulk` lives until the reply has come, which is after the frame has left.
        unsafe {
            self.link.send(Urgency::Demand, &head, &[Piece { ptr: bulk.as_ptr(), len: bulk.len() }], ())
        };
        self.reply(request).unwrap().map(drop)
    }

    pub fn get(&mut self, region: RegionId, first: u64, count: u32) -> Result<Vec<Vec<u8>>, No> {
        let request = self.number();
        let mut head = Vec::new();
        encode_extents(
            &mut head,
            Header::request(Opcode::Get, request).with_region(region),
            &[Extent::new(PageIndex(first), count)],
        );
        self.link.send_head(Urgency::Demand, &head, ());
        let reply = self.reply(request).unwrap()?;
        let mut entries = Vec::new();
        let compressed = self.link.features() & features::LZ4 != 0;
        parse_get_reply(&reply.header, &reply.table, count as usize, compressed, &mut entries).unwrap();
        let mut rest = &reply.bulk[..];
        let page = |entry: &PageEntry| {
            let (bytes, tail) = rest.split_at(entry.len as usize);
            rest = tail;
            let page = match bytes.len() {
                0 => vec![0; OS_PAGE_BYTES],
                OS_PAGE_BYTES => bytes.to_vec(),
                _ => lz4_flex::block::decompress(bytes, OS_PAGE_BYTES).unwrap(),
            };
            assert!(entry.is_zero() || page_crc(&page) == entry.crc, "a page was altered");
            page
        };
        Ok(entries.iter().map(page).collect())
    }

    pub fn discard(&mut self, region: RegionId, first: u64, count: u32) -> Result<(), No> {
        let request = self.number();
        let mut head = Vec::new();
        encode_extents(
            &mut head,
            Header::request(Opcode::Discard, request).with_region(region),
            &[Extent::new(PageIndex(first), count)],
        );
        self.link.send_head(Urgency::Demand, &head, ());
        self.reply(request).unwrap().map(drop)
    }

    /// Waits for the reply to this request, which must be the next one.
    pub fn reply(&mut self, request: u64) -> Result<Result<Reply, No>, LinkError> {
        let reply = self.receive()?;
        assert_eq!(reply.header.request, request);
        if reply.header.status == Status::Ok {
            return Ok(Ok(reply));
        }
        Ok(Err(No {
            status: reply.header.status,
            arg: reply.header.arg,
            message: parse_message(&reply.table),
        }))
    }

    /// The next reply.
    pub fn receive(&mut self) -> Result<Reply, LinkError> {
        let deadline = Instant::now() + DEADLINE;
        let (mut table, mut bulk) = (Vec::new(), Vec::new());
        loop {
            self.link.flush()?;
            match self.link.receive()? {
                Received::Blocked => assert!(self.link.wait(deadline).unwrap(), "the server does not answer"),
                Received::Head(header) if !header.is_reply() => self.unasked.push(header),
                Received::Head(header) => {
                    table.clear();
                    table.extend_from_slice(self.link.table());
                    if header.bulk_len == 0 {
                        return Ok(Reply { header, table, bulk });
                    }
                    bulk = vec![0; header.bulk_len as usize];
                    // SAFETY: `bulk` is not touched before `Bulk`; on an error the link is not used again.
                    unsafe { self.link.place(&[PieceMut { ptr: bulk.as_mut_ptr(), len: bulk.len() }]) };
                }
                Received::Bulk(header) => return Ok(Reply { header, table, bulk }),
            }
        }
    }

    /// Waits until the server closes the connection; says why reading ended.
    pub fn wait_closed(&mut self) -> LinkError {
        loop {
            if let Err(error) = self.receive() {
                return error;
            }
        }
    }
}
