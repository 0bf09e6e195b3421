//! Connections to the least server: [`peer`] with `--many`.

use super::{Connections, load::Connection};
use crate::bench::peer::{self, Wanted};
use anyhow::{Context, Result, bail};
use rampool_wire::frame::page_crc;
use rampool_wire::units::OS_PAGE_BYTES;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};

/// Checksums of the pages that it has.
pub fn crcs() -> Vec<u32> {
    peer::content().chunks(OS_PAGE_BYTES).map(page_crc).collect()
}

struct Client {
    socket: TcpStream,
    asked: Vec<u8>,
    /// A page, and a byte more: room that stays empty means that nothing is left to receive.
    received: Box<[u8]>,
    filled: usize,
}

pub fn connect(address: &str, connections: usize) -> Result<Connections> {
    let mut clients: Connections = Vec::new();
    for _ in 0..connections {
        let socket = TcpStream::connect(address).context("cannot connect to the least server")?;
        peer::set_up(&socket)?;
        socket.set_nonblocking(true)?;
        clients.push(Box::new(Client {
            socket,
            asked: Vec::new(),
            received: vec![0; OS_PAGE_BYTES + 1].into(),
            filled: 0,
        }));
    }
    Ok(clients)
}

impl Connection for Client {
    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn ask(&mut self, page: usize) {
        let wanted = Wanted { from: (page * OS_PAGE_BYTES) as u64, ..Wanted::first(OS_PAGE_BYTES as u64) };
        self.asked.extend_from_slice(&wanted.request());
    }

    fn send(&mut self) -> Result<()> {
        self.socket.write_all(&self.asked).context("the socket takes no requests")?;
        self.asked.clear();
        Ok(())
    }

    fn take(&mut self, answered: &mut Vec<u32>) -> Result<()> {
        loop {
            let room = &mut self.received[self.filled..];
            let asked = room.len();
            let n = match self.socket.read(room) {
                Ok(0) => bail!("the least server closed the connection"),
                Ok(n) => n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            self.filled += n;
            while self.filled >= OS_PAGE_BYTES {
                answered.push(page_crc(&self.received[..OS_PAGE_BYTES]));
                self.received.copy_within(OS_PAGE_BYTES..self.filled, 0);
                self.filled -= OS_PAGE_BYTES;
            }
            if n < asked {
                return Ok(());
            }
        }
    }
}
