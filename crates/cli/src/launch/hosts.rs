//! Other machines: their list, and the command line for a shell there.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Machines and how many ranks each takes, in the order of the file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hosts(Vec<(String, u16)>);

impl Hosts {
    pub fn read(path: &Path) -> Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
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
                bail!("line {}: `{name}` is not a machine name", number + 1);
            }
            let mut slots = 1;
            for word in words {
                let count = word
                    .strip_prefix("slots=")
                    .and_then(|count| count.parse().ok())
                    .filter(|&count| count > 0);
                slots = count.with_context(|| format!("line {}: `{word}` is not slots=N", number + 1))?;
            }
            hosts.push((name.to_owned(), slots));
        }
        if hosts.is_empty() {
            bail!("the file names no machine");
        }
        Ok(Self(hosts))
    }

    /// The machine of each rank. Slots are filled in order, and again from the first.
    pub fn places(&self, ranks: u16) -> Vec<String> {
        let slots = self.0.iter().flat_map(|(name, slots)| std::iter::repeat_n(name, usize::from(*slots)));
        slots.cycle().take(usize::from(ranks)).cloned().collect()
    }
}

/// What a shell on the other machine runs. `from_input` is a variable whose value is the first line of
/// standard input; the values of the others are visible in the machine's process list.
pub fn shell_command(
    directory: &Path,
    variables: &[(&str, OsString)],
    from_input: &str,
    command: &[OsString],
) -> Result<String> {
    let mut text = format!("cd {} && exec env", quoted(directory.as_os_str())?);
    for (name, value) in variables {
        text.push_str(&format!(" {name}={}", quoted(value)?));
    }
    // The user's login shell may have no `read` that stops after the line, so sh reads it.
    text.push_str(&format!(" sh -c 'IFS= read -r {from_input} && export {from_input} && exec \"$@\"' sh"));
    for word in command {
        text.push(' ');
        text.push_str(&quoted(word)?);
    }
    Ok(text)
}

pub fn quoted(word: &OsStr) -> Result<String> {
    let word = word.to_str().with_context(|| format!("{} is not valid UTF-8", word.to_string_lossy()))?;
    Ok(format!("'{}'", word.replace('\'', "'\\''")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::Stdio;

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
        let text = shell_command(Path::new("/"), &[("A_B", "c d'e".into())], "SECRET", &words[..]).unwrap();
        let shown = text.replace("'echo'", "sh -c 'printf \"%s|\" \"$A_B\" \"$SECRET\" \"$@\"; cat'");
        let mut child = std::process::Command::new("sh");
        let mut child =
            child.args(["-c", &shown]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b" a\\b \nthe program's").unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "c d'e| a\\b |$HOME `ls` \"x\"||the program's");
    }
}
