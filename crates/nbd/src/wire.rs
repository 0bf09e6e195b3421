//! The numbers of the protocol, and the heads of messages. All integers are big-endian.

pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// Bytes of a client's flags, of an option's head, of a request's head.
pub const CLIENT_FLAGS_BYTES: usize = 4;
pub const OPTION_BYTES: usize = 16;
pub const REQUEST_BYTES: usize = 28;
/// Zeroes at the end of the answer to `EXPORT_NAME`.
pub const OLD_ZEROES: usize = 124;

pub const FIXED_NEWSTYLE: u32 = 1 << 0;
pub const NO_ZEROES: u32 = 1 << 1;

/// What a client asks for during the handshake.
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Answers to options.
pub mod reply {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    pub const UNSUPPORTED: u32 = ERROR + 1;
    pub const INVALID: u32 = ERROR + 3;
    pub const UNKNOWN: u32 = ERROR + 6;
    pub const SHUTDOWN: u32 = ERROR + 7;
    pub const TOO_BIG: u32 = ERROR + 9;
}

/// Items of information about an export.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod feature {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const FLUSH: u16 = 1 << 2;
    pub const FUA: u16 = 1 << 3;
    pub const TRIM: u16 = 1 << 5;
    pub const WRITE_ZEROES: u16 = 1 << 6;
    pub const DONT_FRAGMENT: u16 = 1 << 7;
    pub const MULTI_CONN: u16 = 1 << 8;
    pub const CACHE: u16 = 1 << 10;
    pub const FAST_ZERO: u16 = 1 << 11;
}

pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command.
pub mod flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DONT_FRAGMENT: u16 = 1 << 2;
    pub const ONE_EXTENT: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Parts of a structured reply.
pub mod chunk {
    pub const DONE: u16 = 1 << 0;
    pub const NONE: u16 = 0;
    pub const DATA: u16 = 1;
    pub const HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) + 1;
}

pub mod error {
    pub const IO: u32 = 5;
    pub const INVALID: u32 = 22;
    pub const NO_SPACE: u32 = 28;
    pub const OVERFLOW: u32 = 75;
}

/// The metadata context of the standard: what is allocated, and what is zero.
pub const ALLOCATION: &[u8] = b"base:allocation";
pub const ALLOCATION_ID: u32 = 1;
pub const HOLE: u32 = 1 << 0;
pub const ZERO: u32 = 1 << 1;

/// A request in the transmission phase.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

impl Request {
    /// `None`: these bytes do not begin with a request.
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if reader.u32()? != REQUEST_MAGIC {
            return None;
        }
        Some(Self {
            flags: reader.u16()?,
            command: reader.u16()?,
            cookie: reader.u64()?,
            offset: reader.u64()?,
            len: reader.u32()?,
        })
    }
}

/// Takes numbers and strings from the front of bytes; `None` where they end too soon.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(front)
    }

    pub fn u16(&mut self) -> Option<u16> {
        self.0.split_first_chunk().map(|(front, rest)| (self.0 = rest, u16::from_be_bytes(*front)).1)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.0.split_first_chunk().map(|(front, rest)| (self.0 = rest, u32::from_be_bytes(*front)).1)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.0.split_first_chunk().map(|(front, rest)| (self.0 = rest, u64::from_be_bytes(*front)).1)
    }

    /// Bytes after a 32-bit length.
    pub fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize::try_from(len).ok()?)
    }
}

/// Appends messages for the client.
pub trait Write {
    fn put(&mut self, bytes: &[u8]);

    fn greeting(&mut self) {
        self.put(&NBD_MAGIC.to_be_bytes());
        self.put(&OPTION_MAGIC.to_be_bytes());
        self.put(&u16::try_from(FIXED_NEWSTYLE | NO_ZEROES).expect("two bits").to_be_bytes());
    }

    /// An answer to an option; its data is in pieces.
    fn option_reply(&mut self, option: u32, reply: u32, data: &[&[u8]]) {
        self.put(&OPTION_REPLY_MAGIC.to_be_bytes());
        self.put(&option.to_be_bytes());
        self.put(&reply.to_be_bytes());
        self.put(
            &u32::try_from(data.iter().map(|piece| piece.len()).sum::<usize>()).expect("short").to_be_bytes(),
        );
        data.iter().for_each(|piece| self.put(piece));
    }

    fn simple_reply(&mut self, error: u32, cookie: u64) {
        self.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        self.put(&error.to_be_bytes());
        self.put(&cookie.to_be_bytes());
    }

    /// The head of a part of a structured reply; `len` bytes follow.
    fn chunk(&mut self, kind: u16, flags: u16, cookie: u64, len: u32) {
        self.put(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        self.put(&flags.to_be_bytes());
        self.put(&kind.to_be_bytes());
        self.put(&cookie.to_be_bytes());
        self.put(&len.to_be_bytes());
    }

    fn error_chunk(&mut self, error: u32, cookie: u64, message: &str) {
        let len = u16::try_from(message.len()).expect("our messages are short");
        self.chunk(chunk::ERROR, chunk::DONE, cookie, 6 + u32::from(len));
        self.put(&error.to_be_bytes());
        self.put(&len.to_be_bytes());
        self.put(message.as_bytes());
    }
}

impl Write for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}
