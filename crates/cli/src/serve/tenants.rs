//! The file that says what tenants may have, and which of their keys are revoked. It is read at the start,
//! and again on SIGHUP; a file that is not valid changes nothing.

use rampool_lease::{MAX_WEIGHT, Quota, Revoked, Rules};
use rampool_wire::tenant::TenantName;
use rampool_wire::units::ByteLen;
use serde::{Deserialize, Deserializer};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

/// Why the file does not count. Says where, and which key.
#[derive(Debug, thiserror::Error)]
pub enum TenantsError {
    #[error("cannot read the tenants file {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("tenants file {path}, line {line}{key}: {message}")]
    Invalid { path: String, line: usize, key: String, message: String },
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct File {
    default: Entry,
    tenant: BTreeMap<Name, TenantEntry>,
}

#[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(try_from = "String")]
struct Name(TenantName);

impl TryFrom<String> for Name {
    type Error = rampool_wire::tenant::TenantNameError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse().map(Self)
    }
}

/// What a section says. An entry that is not there is as in the section `default`.
#[derive(Deserialize, Default, Clone, Copy)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    #[serde(deserialize_with = "size")]
    memory: Option<u64>,
    connections: Option<u64>,
    regions: Option<u64>,
    queues: Option<u64>,
    #[serde(deserialize_with = "size")]
    reply_bytes: Option<u64>,
    #[serde(deserialize_with = "rate")]
    rate: Option<u64>,
    #[serde(deserialize_with = "weight")]
    weight: Option<u32>,
}

/// As [`Entry`], which cannot be flattened into it: unknown keys would pass.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
struct TenantEntry {
    #[serde(deserialize_with = "size")]
    memory: Option<u64>,
    connections: Option<u64>,
    regions: Option<u64>,
    queues: Option<u64>,
    #[serde(deserialize_with = "size")]
    reply_bytes: Option<u64>,
    #[serde(deserialize_with = "rate")]
    rate: Option<u64>,
    #[serde(deserialize_with = "weight")]
    weight: Option<u32>,
    revoked: Option<RevokedEntry>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a list of generations, such as [1, 2], or \"all\"")]
enum RevokedEntry {
    Generations(BTreeSet<u32>),
    Word(All),
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum All {
    All,
}

impl Entry {
    fn quota(self) -> Quota {
        let Self { memory, connections, regions, queues, reply_bytes, rate, weight } = self;
        let (memory_bytes, rate_bytes, weight) = (memory, rate, weight.unwrap_or(1));
        Quota { memory_bytes, connections, regions, queues, reply_bytes, rate_bytes, weight }
    }
}

impl TenantEntry {
    fn quota(&self, default: Entry) -> Quota {
        Entry {
            memory: self.memory.or(default.memory),
            connections: self.connections.or(default.connections),
            regions: self.regions.or(default.regions),
            queues: self.queues.or(default.queues),
            reply_bytes: self.reply_bytes.or(default.reply_bytes),
            rate: self.rate.or(default.rate),
            weight: self.weight.or(default.weight),
        }
        .quota()
    }
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    parsed::<ByteLen, D>(deserializer).map(|size| Some(size.0))
}

fn rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    match parsed::<ByteLen, D>(deserializer)? {
        ByteLen(0) => Err(serde::de::Error::custom(
            "a rate is at least a byte a second; to stop a tenant, revoke its keys",
        )),
        ByteLen(bytes) => Ok(Some(bytes)),
    }
}

fn weight<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let weight = u32::deserialize(deserializer)?;
    if (1..=MAX_WEIGHT).contains(&weight) {
        Ok(Some(weight))
    } else {
        Err(serde::de::Error::custom(format!("a weight is from 1 to {MAX_WEIGHT}, not {weight}")))
    }
}

fn parsed<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
}

/// Reads the file.
pub fn load(path: &Path) -> Result<Rules, TenantsError> {
    let path_text = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text, path_text),
        Err(source) => Err(TenantsError::Read { path: path_text, source }),
    }
}

fn parse(text: &str, path: String) -> Result<Rules, TenantsError> {
    let file: File = toml::from_str(text).map_err(|error| {
        let (line, key) = place(text, error.span());
        // A message may go on with what was expected.
        let message = error.message().split_whitespace().collect::<Vec<_>>().join(" ");
        TenantsError::Invalid { path, line, key, message }
    })?;
    let mut rules = Rules { default: file.default.quota(), ..Rules::default() };
    for (Name(name), entry) in file.tenant {
        rules.quotas.insert(name, entry.quota(file.default));
        let revoked = match entry.revoked {
            None => continue,
            Some(RevokedEntry::Generations(generations)) => Revoked::Generations(generations),
            Some(RevokedEntry::Word(All::All)) => Revoked::All,
        };
        rules.revoked.insert(name, revoked);
    }
    Ok(rules)
}

/// The line of an error, and its section and key, as far as they can be told.
fn place(text: &str, span: Option<Range<usize>>) -> (usize, String) {
    let at = span.map_or(0, |span| span.start).min(text.len());
    let before: Vec<&str> = text.get(..at).unwrap_or("").split('\n').collect();
    let line = before.len();
    let lines: Vec<&str> = text.lines().take(line).collect();
    let is_section = |text: &&&str| text.trim_start().starts_with('[') && !text.contains('=');
    let section = lines.iter().rev().find(is_section).map_or("", |line| line.trim().trim_matches(['[', ']']));
    let key = lines.last().and_then(|line| line.split_once('=')).map_or("", |(key, _)| key.trim());
    let name: Vec<&str> = [section, key].into_iter().filter(|part| !part.is_empty()).collect();
    (line, if name.is_empty() { String::new() } else { format!(", {}", name.join(".")) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rampool_wire::tenant::TenantId;

    fn rules(text: &str) -> Rules {
        parse(text, "t".into()).unwrap()
    }

    #[test]
    fn a_tenant_has_its_own_entries_and_those_of_the_default() {
        let rules = rules(
            "[default]\nconnections = 64\nmemory = \"1G\"\n\n[tenant.alice]\nmemory = \"8G\"\nweight = 4\n\
             rate = \"100M\"\nreply-bytes = \"16M\"\nregions = 5\nqueues = 6\nrevoked = [1, 3]\n\
             [tenant.bob]\nrevoked = \"all\"\n",
        );
        let alice: TenantName = "alice".parse().unwrap();
        let expected = Quota {
            memory_bytes: Some(8 << 30),
            connections: Some(64),
            regions: Some(5),
            queues: Some(6),
            reply_bytes: Some(16 << 20),
            rate_bytes: Some(100 << 20),
            weight: 4,
        };
        assert_eq!(rules.quota(Some(alice)), expected);
        assert_eq!(rules.quota(Some("carol".parse().unwrap())).memory_bytes, Some(1 << 30));
        assert_eq!(rules.quota(None), Quota::default());
        let is_revoked =
            |name: &str, generation| rules.is_revoked(TenantId { name: name.parse().unwrap(), generation });
        assert!(is_revoked("alice", 1) && !is_revoked("alice", 2) && is_revoked("bob", 7));
        assert_eq!(parse("", "t".into()).unwrap(), Rules::default());
    }

    #[test]
    fn an_error_names_file_line_and_key() {
        for (text, expected) in [
            ("[tenant.alice]\nweigth = 2\n", "t.toml, line 2, tenant.alice.weigth: unknown field"),
            ("\n\n[tenant.alice]\nweight = 0\n", "t.toml, line 4, tenant.alice.weight: a weight is from 1"),
            ("[default]\nmemory = \"lots\"\n", "t.toml, line 2, default.memory: "),
            ("[default]\nrate = \"0\"\n", "t.toml, line 2, default.rate: a rate is"),
            ("[default]\nrevoked = [1]\n", "t.toml, line 2, default.revoked: unknown field"),
            (
                "[tenant.alice]\nrevoked = \"some\"\n",
                "t.toml, line 2, tenant.alice.revoked: expected a list of",
            ),
            ("[tenant.alice]\nconnections = -1\n", "t.toml, line 2, tenant.alice.connections: "),
            (
                "[tenant.\"a b\"]\nweight = 1\n",
                "t.toml, line 1, tenant.\"a b\": \"a b\" is no name of a tenant",
            ),
            ("[tenant.alice\n", "t.toml, line 1"),
            ("[tenants.alice]\n", "t.toml, line 1, tenants.alice: unknown field `tenants`"),
        ] {
            let error = parse(text, "t.toml".into()).unwrap_err().to_string();
            assert!(error.starts_with(&format!("tenants file {expected}")), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        let gone = load(Path::new("/no/such/file")).unwrap_err().to_string();
        assert!(gone.contains("/no/such/file") && gone.contains("No such file"), "{gone}");
    }
}
