//! Connections to redis, in its own protocol.

use super::{Connections, TIMEOUT, load::Connection};
use crate::bench::peer;
use anyhow::{Context, Result, bail};
use rampool_wire::frame::page_crc;
use rampool_wire::units::OS_PAGE_BYTES;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

#[derive(Clone, Debug)]
pub enum Address {
    Tcp(u16),
    Unix(PathBuf),
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

struct Client {
    socket: Socket,
    asked: Vec<u8>,
    received: Box<[u8]>,
    filled: usize,
}

/// `$4096\r\n` before a value and `\r\n` after it.
const PREFIX: &[u8] = b"$4096\r\n";
const ANSWER_BYTES: usize = PREFIX.len() + OS_PAGE_BYTES + 2;

pub fn answers(address: &Address) -> bool {
    Client::connect(address).and_then(|mut client| client.call(b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n")).is_ok()
}

pub fn connect(address: &Address, connections: usize, pages: &[Vec<u8>]) -> Result<Connections> {
    let mut first = Client::connect(address)?;
    for (number, page) in pages.iter().enumerate() {
        let key = number.to_string();
        let mut command =
            format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${}\r\n", key.len(), page.len()).into_bytes();
        command.extend_from_slice(page);
        command.extend_from_slice(b"\r\n");
        first.call(&command, b"+OK\r\n")?;
    }
    let mut clients: Connections = Vec::new();
    for _ in 0..connections {
        let client = Client::connect(address)?;
        match &client.socket {
            Socket::Tcp(socket) => socket.set_nonblocking(true)?,
            Socket::Unix(socket) => socket.set_nonblocking(true)?,
        }
        clients.push(Box::new(client));
    }
    Ok(clients)
}

impl Client {
    fn connect(address: &Address) -> Result<Self> {
        let socket = match address {
            Address::Tcp(port) => {
                let socket = TcpStream::connect(("127.0.0.1", *port))?;
                peer::set_up(&socket)?;
                socket.set_read_timeout(Some(TIMEOUT))?;
                Socket::Tcp(socket)
            }
            Address::Unix(path) => {
                let socket = UnixStream::connect(path)?;
                socket.set_read_timeout(Some(TIMEOUT))?;
                Socket::Unix(socket)
            }
        };
        Ok(Self { socket, asked: Vec::new(), received: vec![0; 256 * 1024].into(), filled: 0 })
    }

    fn call(&mut self, command: &[u8], want: &[u8]) -> Result<()> {
        let mut got = vec![0; want.len()];
        match &mut self.socket {
            Socket::Tcp(socket) => socket.write_all(command).and_then(|()| socket.read_exact(&mut got)),
            Socket::Unix(socket) => socket.write_all(command).and_then(|()| socket.read_exact(&mut got)),
        }
        .context("redis does not answer")?;
        if got != want {
            bail!("redis says {:?}", String::from_utf8_lossy(&got));
        }
        Ok(())
    }
}

impl Connection for Client {
    fn fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Socket::Tcp(socket) => socket.as_fd(),
            Socket::Unix(socket) => socket.as_fd(),
        }
    }

    fn ask(&mut self, page: usize) {
        let mut digits = [0; 20];
        let mut rest = page;
        let mut start = digits.len();
        loop {
            start -= 1;
            digits[start] = b'0' + u8::try_from(rest % 10).expect("a digit");
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        let key = &digits[start..];
        // Writing into a vector does not fail.
        let _ = write!(self.asked, "*2\r\n$3\r\nGET\r\n${}\r\n", key.len());
        self.asked.extend_from_slice(key);
        self.asked.extend_from_slice(b"\r\n");
    }

    fn send(&mut self) -> Result<()> {
        if !self.asked.is_empty() {
            match &mut self.socket {
                Socket::Tcp(socket) => socket.write_all(&self.asked),
                Socket::Unix(socket) => socket.write_all(&self.asked),
            }
            .context("the socket takes no requests")?;
            self.asked.clear();
        }
        Ok(())
    }

    fn take(&mut self, answered: &mut Vec<u32>) -> Result<()> {
        loop {
            let room = &mut self.received[self.filled..];
            let asked = room.len();
            let read = match &mut self.socket {
                Socket::Tcp(socket) => socket.read(room),
                Socket::Unix(socket) => socket.read(room),
            };
            let n = match read {
                Ok(0) => bail!("redis closed the connection"),
                Ok(n) => n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            self.filled += n;
            let mut start = 0;
            while self.filled - start >= ANSWER_BYTES {
                let answer = &self.received[start..start + ANSWER_BYTES];
                if !answer.starts_with(PREFIX) || !answer.ends_with(b"\r\n") {
                    bail!("redis says {:?}", String::from_utf8_lossy(&answer[..20]));
                }
                answered.push(page_crc(&answer[PREFIX.len()..PREFIX.len() + OS_PAGE_BYTES]));
                start += ANSWER_BYTES;
            }
            self.received.copy_within(start..self.filled, 0);
            self.filled -= start;
            // As the memory server's link does: less than there was room for means that nothing is left.
            if n < asked {
                return Ok(());
            }
        }
    }
}
