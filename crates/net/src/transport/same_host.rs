//! Which transport a program wants within its machine.

/// How a client reaches servers on its own machine, those named `unix:PATH`, and a rank of the shared view
/// the ranks on its machine. Servers with another kind of address are of no concern to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SameHost {
    /// Through shared memory where both can, else through the socket: the Unix socket to a server, TCP to a
    /// rank.
    #[default]
    Auto,
    /// Through shared memory; a server that cannot is not used, and ranks that cannot do not run together.
    Rings,
    /// As `Auto`, and rings to servers are long: for one that moves MiBs at a time. They take 4 MiB each
    /// instead of half a MiB.
    LongRings,
    /// Through the socket.
    Socket,
}

/// The variable that chooses where the program does not.
pub const SAME_HOST_VARIABLE: &str = "RAMPOOL_SAME_HOST";

impl std::fmt::Display for SameHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SameHost::Auto => "auto",
            SameHost::Rings => "rings",
            SameHost::LongRings => "long-rings",
            SameHost::Socket => "socket",
        })
    }
}

impl std::str::FromStr for SameHost {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(SameHost::Auto),
            "rings" => Ok(SameHost::Rings),
            "long-rings" => Ok(SameHost::LongRings),
            "socket" => Ok(SameHost::Socket),
            _ => Err(format!("{text:?} is not `auto`, `rings`, `long-rings` or `socket`")),
        }
    }
}

impl SameHost {
    /// What the environment says, `Auto` if nothing.
    ///
    /// # Errors
    /// A text that names the variable and says what is wrong with its value.
    pub fn from_environment() -> Result<Self, String> {
        match std::env::var(SAME_HOST_VARIABLE) {
            Ok(text) => text.parse().map_err(|error| format!("{SAME_HOST_VARIABLE}: {error}")),
            Err(_) => Ok(SameHost::Auto),
        }
    }
}
