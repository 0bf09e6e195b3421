//! The handshake: the client's flags, then options, until it has chosen an export.

use super::{Chosen, End, Input, Outputs, Violation, features, front};
use crate::export::Exports;
use crate::wire::{self, Reader, Write, info, option, reply};
use crate::{MOST_PAYLOAD_BYTES, PREFERRED_BYTES};

/// Bytes of an option that are looked at; a longer one is refused.
pub const MOST_OPTION_BYTES: usize = 64 << 10;
/// An option that is longer still is no mistake.
const SUSPICIOUS_OPTION_BYTES: u32 = 16 << 20;
pub const MOST_OPTIONS: u32 = 4096;

#[derive(Debug, Default)]
pub struct Handshake {
    /// `None`: they have not come yet.
    client_flags: Option<u32>,
    options: u32,
    /// Bytes of a refused option that are still to come.
    skip: u32,
    structured: bool,
    /// The export for which the client wants to ask for block status.
    allocation: Option<usize>,
    draining: bool,
}

impl Handshake {
    pub fn handle(
        &mut self,
        exports: &Exports,
        input: Input<'_>,
        out: &mut Outputs,
    ) -> Result<(usize, Option<Chosen>), End> {
        match input {
            Input::Bytes(bytes) => self.bytes(exports, bytes, out),
            Input::Draining => {
                self.draining = true;
                Ok((0, None))
            }
            _ => panic!("nothing was asked for during the handshake"),
        }
    }

    fn bytes(
        &mut self,
        exports: &Exports,
        bytes: &[u8],
        out: &mut Outputs,
    ) -> Result<(usize, Option<Chosen>), End> {
        if self.skip > 0 {
            let taken = bytes.len().min(self.skip as usize);
            self.skip -= u32::try_from(taken).expect("no more than is left");
            return Ok((taken, None));
        }
        if self.client_flags.is_none() {
            let Some(flags) = front::<{ wire::CLIENT_FLAGS_BYTES }>(bytes) else { return Ok((0, None)) };
            let flags = u32::from_be_bytes(*flags);
            if flags & !(wire::FIXED_NEWSTYLE | wire::NO_ZEROES) != 0 {
                return Err(Violation::ClientFlags(flags).into());
            }
            self.client_flags = Some(flags);
            return Ok((wire::CLIENT_FLAGS_BYTES, None));
        }
        let Some(head) = front::<{ wire::OPTION_BYTES }>(bytes) else { return Ok((0, None)) };
        let mut reader = Reader(head);
        let (magic, option, len) =
            (reader.u64(), reader.u32().expect("a head"), reader.u32().expect("a head"));
        if magic != Some(wire::OPTION_MAGIC) {
            return Err(Violation::NoOption.into());
        }
        let whole = wire::OPTION_BYTES + len as usize;
        if len as usize > MOST_OPTION_BYTES {
            if option == option::EXPORT_NAME || len > SUSPICIOUS_OPTION_BYTES {
                return Err(Violation::LongOption { option, len }.into());
            }
            self.count()?;
            self.skip = len;
            let known = (option::ABORT..=option::LIST).contains(&option)
                || (option::INFO..=option::SET_META_CONTEXT).contains(&option);
            refuse(
                out,
                option,
                if known { reply::TOO_BIG } else { reply::UNSUPPORTED },
                "the option is too long",
            );
            return Ok((wire::OPTION_BYTES, None));
        }
        let Some(data) = bytes.get(wire::OPTION_BYTES..whole) else { return Ok((0, None)) };
        self.count()?;
        Ok((whole, self.option(exports, option, data, out)?))
    }

    fn count(&mut self) -> Result<(), End> {
        self.options += 1;
        if self.options > MOST_OPTIONS { Err(Violation::ManyOptions.into()) } else { Ok(()) }
    }

    fn option(
        &mut self,
        exports: &Exports,
        option: u32,
        data: &[u8],
        out: &mut Outputs,
    ) -> Result<Option<Chosen>, End> {
        if option == option::ABORT {
            out.option_reply(option, reply::ACK, &[]);
            return Err(End::Goodbye);
        }
        if self.draining && option != option::EXPORT_NAME {
            refuse(out, option, reply::SHUTDOWN, "the memory server stops");
            return Ok(None);
        }
        match option {
            option::EXPORT_NAME => {
                let export = exports.find(data).filter(|_| !self.draining).ok_or(Violation::NoSuchExport)?;
                let chosen = self.choose(export);
                out.put(&exports.list()[export].bytes.to_be_bytes());
                out.put(&features(self.structured).to_be_bytes());
                if self.client_flags.unwrap_or(0) & wire::NO_ZEROES == 0 {
                    out.put(&[0; wire::OLD_ZEROES]);
                }
                return Ok(Some(chosen));
            }
            option::LIST if data.is_empty() => {
                for export in exports.list() {
                    let name = export.name.as_bytes();
                    out.option_reply(option, reply::SERVER, &[&string_len(name), name]);
                }
                out.option_reply(option, reply::ACK, &[]);
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                out.option_reply(option, reply::ACK, &[]);
            }
            option::LIST | option::STRUCTURED_REPLY => {
                refuse(out, option, reply::INVALID, "the option has no data")
            }
            option::INFO | option::GO => return Ok(self.info(exports, option, data, out)),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(exports, option, data, out)
            }
            _ => refuse(out, option, reply::UNSUPPORTED, "the option is unknown here"),
        }
        Ok(None)
    }

    /// `INFO`, and `GO`, which chooses the export.
    fn info(&self, exports: &Exports, option: u32, data: &[u8], out: &mut Outputs) -> Option<Chosen> {
        let Some((name, wanted)) = parse_info(data) else {
            refuse(out, option, reply::INVALID, "the option's lengths contradict each other");
            return None;
        };
        let Some(index) = exports.find(name) else {
            refuse(out, option, reply::UNKNOWN, "no such export; ask for the list of exports");
            return None;
        };
        let export = &exports.list()[index];
        let wants = |kind: u16| wanted.as_chunks().0.iter().any(|wanted| u16::from_be_bytes(*wanted) == kind);
        let (bytes, flags) = (export.bytes.to_be_bytes(), features(self.structured).to_be_bytes());
        out.option_reply(option, reply::INFO, &[&info::EXPORT.to_be_bytes(), &bytes, &flags]);
        if wants(info::NAME) {
            out.option_reply(option, reply::INFO, &[&info::NAME.to_be_bytes(), export.name.as_bytes()]);
        }
        if wants(info::BLOCK_SIZE) {
            let sizes = [1, PREFERRED_BYTES, MOST_PAYLOAD_BYTES].map(u32::to_be_bytes);
            out.option_reply(option, reply::INFO, &[&info::BLOCK_SIZE.to_be_bytes(), sizes.as_flattened()]);
        }
        out.option_reply(option, reply::ACK, &[]);
        (option == option::GO).then(|| self.choose(index))
    }

    fn meta_context(&mut self, exports: &Exports, option: u32, data: &[u8], out: &mut Outputs) {
        let sets = option == option::SET_META_CONTEXT;
        if sets {
            self.allocation = None;
        }
        if !self.structured {
            return refuse(out, option, reply::INVALID, "structured replies come first");
        }
        let Some((name, queries)) = parse_meta_context(data) else {
            return refuse(out, option, reply::INVALID, "the option's lengths contradict each other");
        };
        let Some(export) = exports.find(name) else {
            return refuse(out, option, reply::UNKNOWN, "no such export; ask for the list of exports");
        };
        let names_it = |query: &&[u8]| *query == wire::ALLOCATION || !sets && *query == b"base:";
        if queries.iter().any(names_it) || !sets && queries.is_empty() {
            let id = if sets { wire::ALLOCATION_ID } else { 0 };
            out.option_reply(option, reply::META_CONTEXT, &[&id.to_be_bytes(), wire::ALLOCATION]);
            if sets {
                self.allocation = Some(export);
            }
        }
        out.option_reply(option, reply::ACK, &[]);
    }

    fn choose(&self, export: usize) -> Chosen {
        Chosen { export, structured: self.structured, allocation: self.allocation == Some(export) }
    }
}

/// The name of the export, and the items of information asked for.
fn parse_info(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut reader = Reader(data);
    let name = reader.string()?;
    let count = reader.u16()?;
    let wanted = reader.bytes(usize::from(count) * 2)?;
    reader.0.is_empty().then_some((name, wanted))
}

/// The name of the export, and the queries.
fn parse_meta_context(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let mut reader = Reader(data);
    let name = reader.string()?;
    let count = reader.u32()?;
    let mut queries = Vec::new();
    for _ in 0..count {
        // Each has a length at least, so that the data bounds how many there are.
        queries.push(reader.string()?);
    }
    reader.0.is_empty().then_some((name, queries))
}

fn string_len(string: &[u8]) -> [u8; 4] {
    u32::try_from(string.len()).expect("names are short").to_be_bytes()
}

fn refuse(out: &mut Outputs, option: u32, why: u32, message: &str) {
    out.option_reply(option, why, &[message.as_bytes()]);
}
