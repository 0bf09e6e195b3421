//! Connections to a memory server.

use super::{Connections, TIMEOUT, load::Connection};
use anyhow::{Context, Result, bail};
use rampool_net::transport::{
    Endpoint, Flush, Link, LocalPolicy, Piece, PieceMut, Received, Urgency, connect as connect_link,
};
use rampool_wire::frame::{
    Header, Opcode, OpenLease, PageEntry, RegionId, Status, encode_extents, encode_frame, encode_put,
    page_crc, parse_message,
};
use rampool_wire::session::Encryption;
use rampool_wire::units::{Extent, OS_PAGE_BYTES, PageIndex};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

/// A lease of its own for every connection: clients that know nothing of each other.
struct Client {
    link: Link,
    region: RegionId,
    request: u64,
    head: Vec<u8>,
    page: Box<[u8]>,
}

pub fn connect(
    endpoint: &Endpoint,
    connections: usize,
    pages: &[Vec<u8>],
    features: u32,
) -> Result<Connections> {
    let share = (pages.len() * OS_PAGE_BYTES + (1 << 20)) as u64;
    let policy = LocalPolicy { key: None, encryption: Encryption::Auto, features, ucx: None };
    // The first client's region holds the pages; the others are members of its lease, each with a
    // copy-on-write copy of the region.
    let mut first = Client::new(connect_link(endpoint, policy.clone(), Instant::now() + TIMEOUT)?);
    let open = OpenLease { bytes: share, pid: std::process::id(), name: "bench".into(), host: "here".into() };
    let granted = first.call(Opcode::OpenLease, 0, &open.encode())?.1;
    let granted = rampool_wire::frame::Granted::parse(&granted)?;
    first.region = RegionId(first.call(Opcode::CreateRegion, 0, &[])?.0.region);
    for (index, chunk) in pages.chunks(256).enumerate() {
        first.put((index * 256) as u64, chunk)?;
    }
    let mut clients = Vec::new();
    for _ in 1..connections {
        let copy = first.call(Opcode::CloneRegion, first.region.0, &[])?.0.region;
        let mut client = Client::new(connect_link(endpoint, policy.clone(), Instant::now() + TIMEOUT)?);
        let attach = rampool_wire::frame::AttachLease {
            lease: granted.lease,
            token: granted.token,
            member: rampool_wire::frame::MemberId(0),
            pid: std::process::id(),
            name: "bench".into(),
            host: "here".into(),
        };
        client.call(Opcode::AttachLease, 0, &attach.encode())?;
        client.call(Opcode::AdoptRegion, copy, &[])?;
        client.region = RegionId(copy);
        clients.push(Box::new(client) as Box<dyn Connection>);
    }
    clients.push(Box::new(first));
    Ok(clients)
}

impl Client {
    fn new(link: Link) -> Self {
        Self { link, region: RegionId(0), request: 0, head: Vec::new(), page: vec![0; OS_PAGE_BYTES].into() }
    }

    /// A control request and its answer. Blocks.
    fn call(&mut self, opcode: Opcode, region: u64, table: &[u8]) -> Result<(Header, Vec<u8>)> {
        self.request += 1;
        self.head.clear();
        encode_frame(
            &mut self.head,
            Header::request(opcode, self.request).with_region(RegionId(region)),
            table,
            0,
        );
        self.link.send_head(Urgency::Demand, &self.head, ());
        self.answer()
    }

    fn put(&mut self, first: u64, pages: &[Vec<u8>]) -> Result<()> {
        let full = u32::try_from(OS_PAGE_BYTES)?;
        let entries: Vec<PageEntry> =
            pages.iter().map(|page| PageEntry { crc: page_crc(page), len: full }).collect();
        let pieces: Vec<Piece> =
            pages.iter().map(|page| Piece { ptr: page.as_ptr(), len: page.len() }).collect();
        let extent = Extent::new(PageIndex(first), u32::try_from(pages.len())?);
        self.request += 1;
        self.head.clear();
        encode_put(
            &mut self.head,
            Header::request(Opcode::Put, self.request).with_region(self.region),
            &[extent],
            &entries,
        );
        // SAFETY: the pages are borrowed until the answer has come, which is after the frame has left.
        unsafe { self.link.send(Urgency::Demand, &self.head, &pieces, ()) };
        self.answer().map(drop)
    }

    fn answer(&mut self) -> Result<(Header, Vec<u8>)> {
        answer(&mut self.link)
    }
}

/// The memory server's next answer on a connection that waits for nothing else. Blocks.
pub(in crate::bench) fn answer(link: &mut Link) -> Result<(Header, Vec<u8>)> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        link.flush()?;
        match link.receive()? {
            Received::Head(header) if header.status == Status::Ok => {
                return Ok((header, link.table().to_vec()));
            }
            Received::Head(_) => bail!("the memory server says: {}", parse_message(link.table())),
            Received::Bulk(_) => bail!("the memory server sent pages without a request"),
            Received::Blocked if link.wait(deadline)? => {}
            Received::Blocked => bail!("the memory server does not answer"),
        }
    }
}

impl Connection for Client {
    fn fd(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }

    fn may_sleep(&self) -> bool {
        self.link.may_sleep(true)
    }

    fn ask(&mut self, page: usize) {
        self.request += 1;
        self.head.clear();
        let header = Header::request(Opcode::Get, self.request).with_region(self.region);
        encode_extents(&mut self.head, header, &[Extent::page(PageIndex(page as u64))]);
        self.link.send_head(Urgency::Demand, &self.head, ());
    }

    fn send(&mut self) -> Result<()> {
        match self.link.flush()? {
            Flush::Empty => Ok(()),
            Flush::Blocked | Flush::Stopped => bail!("the socket takes no requests"),
        }
    }

    fn take(&mut self, answered: &mut Vec<u32>) -> Result<()> {
        loop {
            match self.link.receive()? {
                Received::Blocked => return Ok(()),
                Received::Head(header) => {
                    if header.status != Status::Ok {
                        bail!("the memory server says: {}", parse_message(self.link.table()));
                    }
                    if header.bulk_len as usize != OS_PAGE_BYTES {
                        bail!("{} bytes in answer to a read of one page", header.bulk_len);
                    }
                    // SAFETY: `page` is only read after `Bulk`, and lives as long as the link.
                    unsafe {
                        self.link.place(&[PieceMut { ptr: self.page.as_mut_ptr(), len: OS_PAGE_BYTES }])
                    };
                }
                Received::Bulk(header) => {
                    // The server answers one connection in order.
                    let expected =
                        self.request.checked_sub(header.request).context("an answer from the future")?;
                    debug_assert!(expected < 1 << 20);
                    answered.push(page_crc(&self.page));
                }
            }
        }
    }
}
