//! Other machines: which there are, and how a command line reaches a shell there.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Machines and how many ranks each takes, in the order of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hosts(Vec<(String, u16)>);

impl Hosts {
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    /// One machine a line: a name, perhaps `slots=N`. `#` begins a comment.
    fn parse(text: &str) -> Result<Self> {
        let mut hosts = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = line.split_whitespace();
            let Some(name) = words.next() else { continue };
            if name.starts_with('-') {
                bail!("line {}: {name} is no machine's name", number + 1);
            }
            let mut slots = 1;
            for word in words {
                let count = word.strip_prefix("slots=").and_then(|count| count.parse().ok()).filter(|&count| count > 0);
                slots = count.with_context(|| format!("line {}: `{word}` is not slots=N", number + 1))?;
            }
            hosts.push((name.to_owned(), slots));
        }
        if hosts.is_empty() {
            bail!("it names no machine");
        }
        Ok(Self(hosts))
    }

    /// The machine of each rank: slots are filled in order, again and again.
    pub fn places(&self, ranks: u16) -> Vec<String> {
        let slots = self.0.iter().flat_map(|(name, slots)| std::iter::repeat_n(name, usize::from(*slots)));
        slots.cycle().take(usize::from(ranks)).cloned().collect()
    }
}

/// What a shell on the other machine runs.
pub fn shell_command(directory: &Path, variables: &[(&str, OsString)], command: &[OsString]) -> Result<String> {
    let mut text = format!("cd {} && exec env", quoted(directory.as_os_str())?);
    for (name, value) in variables {
        text.push_str(&format!(" {name}={}", quoted(value)?));
    }
    for word in command {
        text.push(' ');
        text.push_str(&quoted(word)?);
    }
    Ok(text)
}

fn quoted(word: &OsStr) -> Result<String> {
    let word = word.to_str().with_context(|| format!("{} is no text", word.to_string_lossy()))?;
    Ok(format!("'{}'", word.replace('\'', "'\\''")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_filled_in_order() {
        let hosts = Hosts::parse("# ours\na slots=2\n\n b # slow\n").unwrap();
        assert_eq!(hosts.places(5), ["a", "a", "b", "a", "a"]);
        for text in ["", "# nothing", "a slots=0", "a slots=x", "a b", "-oProxyCommand=x"] {
            assert!(Hosts::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_shell_gets_the_words_as_they_are() {
        let words = ["echo", "it's", "$HOME `ls` \"x\"", ""].map(OsString::from);
        let text = shell_command(Path::new("/"), &[("A_B", "c d'e".into())], &words[..]).unwrap();
        let shown = text.replace("'echo'", "sh -c 'printf \"%s|\" \"$A_B\" \"$@\"'");
        let output = std::process::Command::new("sh").args(["-c", &shown]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "c d'e|$HOME `ls` \"x\"||");
    }
}
