//! The input of a DLM-M program: the `dlmm.conf` file and the options after `--` on its command line.
//!
//! Both are parsed exactly as DLM-M (Saito, Midorikawa, Kai) describes them. One addition: a host may have a
//! port (`memhost1:7000`), so that several servers can run on one machine.
//!
//! Pure: it takes a text and returns a value, or an error with a line number.

use rampool::pool::{ServerSpec, ServerSpecError};
use rampool::proto::units::ByteLen;

/// A parsed `dlmm.conf`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conf {
    /// The first line: this machine's name (informative) ...
    pub compute_node: String,
    /// ... and the local memory it may use.
    pub local: ByteLen,
    /// The other lines: memory servers, each with the memory wanted from it.
    pub servers: Vec<ServerSpec>,
}

/// Why a text is not a valid `dlmm.conf`.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfError {
    #[error("line {line}: expected `host megabytes`, found {found:?}")]
    NotTwoWords { line: usize, found: String },
    #[error("line {line}: {found:?} is not a number of megabytes above zero")]
    BadMegabytes { line: usize, found: String },
    #[error("line {line}: {reason}")]
    BadServer { line: usize, reason: ServerSpecError },
    #[error(
        "no line names the compute node; the first line is this machine and the local memory it may use, \
         such as `calhost 2048`"
    )]
    NoComputeNode,
    #[error("no line names a memory server; every line after the first is one, such as `memhost1 2048`")]
    NoServers,
    #[error("-n {wanted} asks for {wanted} nodes, but the file names only {named}")]
    TooFewNodes { wanted: usize, named: usize },
}

impl Conf {
    /// Reads the text of a `dlmm.conf`. `nodes` (from `-n`): the compute node and the first `nodes - 1`
    /// servers are used; `None`: all of them.
    pub fn parse(text: &str, nodes: Option<usize>) -> Result<Self, ConfError> {
        let mut lines = Vec::new();
        for (n, line) in text.lines().enumerate() {
            let line_number = n + 1;
            let content = line.split_once("//").map_or(line, |(before, _)| before).trim();
            if content.is_empty() {
                continue;
            }
            let mut words = content.split_whitespace();
            let (Some(host), Some(megabytes), None) = (words.next(), words.next(), words.next()) else {
                return Err(ConfError::NotTwoWords { line: line_number, found: content.to_owned() });
            };
            let bad = || ConfError::BadMegabytes { line: line_number, found: megabytes.to_owned() };
            let amount: u64 = megabytes.parse().map_err(|_| bad())?;
            let bytes = amount.checked_mul(ByteLen::MIB).filter(|b| *b > 0).ok_or_else(bad)?;
            lines.push((line_number, host, ByteLen(bytes)));
        }
        let Some(((_, compute_node, local), rest)) = lines.split_first() else {
            return Err(ConfError::NoComputeNode);
        };
        if rest.is_empty() {
            return Err(ConfError::NoServers);
        }
        let servers_used = match nodes {
            None => rest.len(),
            Some(wanted) if wanted > lines.len() => {
                return Err(ConfError::TooFewNodes { wanted, named: lines.len() });
            }
            Some(wanted) if wanted < 2 => return Err(ConfError::NoServers),
            Some(wanted) => wanted - 1,
        };
        let mut servers = Vec::with_capacity(servers_used);
        for (line, host, memory) in &rest[..servers_used] {
            let bad = |reason| ConfError::BadServer { line: *line, reason };
            let server: ServerSpec = host.parse().map_err(bad)?;
            if server.memory.is_some() {
                return Err(bad(ServerSpecError::NoAddress((*host).to_owned())));
            }
            servers.push(ServerSpec { memory: Some(*memory), ..server });
        }
        Ok(Self { compute_node: (*compute_node).to_owned(), local: *local, servers })
    }
}

/// The options after `--` on the program's command line: `-- -n 4 -f dlmm.conf`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// `-n`: the nodes to use, the compute node among them; `None`: all that the file names.
    pub nodes: Option<usize>,
    /// `-f`: the file [default: `dlmm.conf` in the working directory].
    pub file: String,
}

/// Why the words after `--` are invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    #[error("{0} needs a value, as in `-- -n 4 -f dlmm.conf`")]
    NoValue(String),
    #[error("invalid -n {0:?}: give the number of nodes, at least 2 (this machine and one memory server)")]
    BadNodes(String),
    #[error("unknown option {0:?} after `--`; known options are -n NODES and -f FILE")]
    Unknown(String),
}

impl Options {
    /// Parses the words after the *last* `--` of a command line (a program may use an earlier one itself).
    /// Without one, returns the defaults.
    pub fn parse<S: AsRef<str>>(arguments: &[S]) -> Result<Self, OptionsError> {
        let mut options = Self { nodes: None, file: "dlmm.conf".to_owned() };
        let Some(at) = arguments.iter().rposition(|a| a.as_ref() == "--") else {
            return Ok(options);
        };
        let mut words = arguments[at + 1..].iter().map(AsRef::as_ref);
        while let Some(word) = words.next() {
            match word {
                "-n" => {
                    let value = words.next().ok_or_else(|| OptionsError::NoValue(word.to_owned()))?;
                    let nodes = value.parse().ok().filter(|n| *n >= 2);
                    options.nodes = Some(nodes.ok_or_else(|| OptionsError::BadNodes(value.to_owned()))?);
                }
                "-f" => {
                    let value = words.next().ok_or_else(|| OptionsError::NoValue(word.to_owned()))?;
                    options.file = value.to_owned();
                }
                other => return Err(OptionsError::Unknown(other.to_owned())),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAPER: &str = "\
calhost    2048 // 2GB compute node
memhost1   2048 // 2GB memory server 1
memhost2   4096 // 4GB memory server 2
";

    fn hosts(conf: &Conf) -> Vec<String> {
        conf.servers.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_file_of_the_paper_is_read_as_it_stands() {
        let conf = Conf::parse(PAPER, Some(3)).unwrap();
        assert_eq!((conf.compute_node.as_str(), conf.local), ("calhost", ByteLen(2 << 30)));
        let port = rampool::DEFAULT_PORT;
        assert_eq!(
            hosts(&conf),
            [format!("memhost1:{port}={}", 2u64 << 30), format!("memhost2:{port}={}", 4u64 << 30)]
        );
        assert_eq!(Conf::parse(PAPER, None), Ok(conf));
    }

    #[test]
    fn n_says_how_many_of_the_lines_are_used() {
        assert_eq!(Conf::parse(PAPER, Some(2)).unwrap().servers.len(), 1);
        assert_eq!(Conf::parse(PAPER, Some(4)), Err(ConfError::TooFewNodes { wanted: 4, named: 3 }));
    }

    #[test]
    fn comments_empty_lines_tabs_and_ports_are_fine() {
        let text = "// the cluster\n\n  a\t16//x\r\n//b 17\nlocalhost:7001 18\n[::1]:7002 19";
        let conf = Conf::parse(text, None).unwrap();
        assert_eq!(conf.local, ByteLen(16 << 20));
        assert_eq!(
            hosts(&conf),
            [format!("localhost:7001={}", 18 << 20), format!("[::1]:7002={}", 19 << 20)]
        );
    }

    #[test]
    fn errors_name_the_line() {
        assert_eq!(Conf::parse("", None), Err(ConfError::NoComputeNode));
        assert_eq!(Conf::parse("a 1", None), Err(ConfError::NoServers));
        assert_eq!(Conf::parse("a 1\nb", None), Err(ConfError::NotTwoWords { line: 2, found: "b".into() }));
        assert_eq!(
            Conf::parse("a 1\nb 2 3", None),
            Err(ConfError::NotTwoWords { line: 2, found: "b 2 3".into() })
        );
        for amount in ["0", "-5", "2G", "99999999999999999999", "17592186044416"] {
            let expected = ConfError::BadMegabytes { line: 1, found: amount.into() };
            assert_eq!(Conf::parse(&format!("a {amount}\nb 1"), None), Err(expected));
        }
        assert!(matches!(Conf::parse("a 1\nb=2G 1", None), Err(ConfError::BadServer { line: 2, .. })));
        assert!(matches!(Conf::parse("a 1\nb:0 1", None), Err(ConfError::BadServer { line: 2, .. })));
    }

    #[test]
    fn options_stand_behind_two_dashes() {
        let parse = |line: &str| Options::parse(&line.split(' ').collect::<Vec<_>>());
        let file = |file: &str, nodes| Ok(Options { nodes, file: file.into() });
        assert_eq!(parse("prog 100 -- -n 4 -f my.conf"), file("my.conf", Some(4)));
        assert_eq!(parse("prog -n 7 -f x"), file("dlmm.conf", None));
        assert_eq!(parse("prog -- x -- -f y"), file("y", None));
        assert_eq!(parse("prog --"), file("dlmm.conf", None));
        assert_eq!(parse("prog -- -n"), Err(OptionsError::NoValue("-n".into())));
        assert_eq!(parse("prog -- -n 1"), Err(OptionsError::BadNodes("1".into())));
        assert_eq!(parse("prog -- -n four"), Err(OptionsError::BadNodes("four".into())));
        assert_eq!(parse("prog -- -q"), Err(OptionsError::Unknown("-q".into())));
    }
}
