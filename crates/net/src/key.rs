//! The pool's key: 32 random bytes in a file only its owner may read. A process with the key may use the
//! pool; both ends prove that they have it and it never travels.
//!
//! Keys of tenants are derived from it, the master: HKDF-SHA256 (RFC 5869) over name and generation. A server
//! with the master can derive all of them; a tenant's key says nothing about the master or another tenant's.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use rampool_wire::tenant::{TenantId, TenantName};
use rampool_wire::units::OS_PAGE_BYTES;

/// Bytes of a key.
pub const KEY_BYTES: usize = 32;

/// What else keys might be derived for: this is for tenants.
const TENANT_SALT: &[u8] = b"rampool tenant key 1";

/// A key: a master, or that of a tenant. Its `Debug` form does not show it, and it is not in core dumps.
#[derive(Clone)]
pub struct Key {
    secret: Arc<Secret>,
    tenant: Option<TenantId>,
}

/// Memory of its own for a key, so that no core dump has it and no swap, as far as the kernel allows that. It
/// is overwritten when the last copy goes.
struct Secret {
    page: NonNull<[u8; KEY_BYTES]>,
}

// SAFETY: it is written once, before anything else refers to it, and only read after that.
unsafe impl Send for Secret {}
// SAFETY: as above.
unsafe impl Sync for Secret {}

impl Secret {
    fn new(bytes: [u8; KEY_BYTES]) -> Self {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous};
        // SAFETY: a new mapping at an address of the kernel's choice, of a page.
        let page = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                OS_PAGE_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let page = page.expect("there is memory for a page").cast::<[u8; KEY_BYTES]>();
        let page = NonNull::new(page).expect("the kernel maps nothing at 0");
        // Best effort, each of them.
        // SAFETY: the page is this function's alone; neither changes what is in it.
        unsafe {
            let _ = madvise(page.as_ptr().cast(), OS_PAGE_BYTES, Advice::LinuxDontDump);
            let _ = mlock(page.as_ptr().cast(), OS_PAGE_BYTES);
        }
        // SAFETY: writable, long enough, and known to this function alone.
        unsafe { page.write(bytes) };
        Self { page }
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which no reference is left; a volatile write is not left out.
        unsafe {
            self.page.write_volatile([0; KEY_BYTES]);
            let _ = rustix::mm::munmap(self.page.as_ptr().cast(), OS_PAGE_BYTES);
        }
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        let differ = self.bytes().iter().zip(other.bytes()).fold(0, |all, (one, other)| all | (one ^ other));
        differ == 0 && self.tenant == other.tenant
    }
}

impl Eq for Key {}

/// Why there is no key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    #[error("cannot {operation} key file {path}: {source}")]
    Io { operation: &'static str, path: PathBuf, source: std::io::Error },
    #[error("key file {path} can be read by others (mode {mode:o}); run: chmod 600 {path}")]
    Readable { path: PathBuf, mode: u32 },
    #[error(
        "{path} is no key file: it must hold 64 hexadecimal digits, before them the name and the generation \
         of a tenant if it is one's"
    )]
    Malformed { path: PathBuf },
    #[error("this is the key of tenant {0}; keys of tenants are derived from the master key")]
    NotMaster(TenantId),
}

impl Key {
    /// A fresh random key.
    ///
    /// # Panics
    /// If the kernel has no random numbers to give.
    #[must_use]
    pub fn generate() -> Self {
        Self::from_bytes(random_bytes())
    }

    #[must_use]
    pub fn from_bytes(bytes: [u8; KEY_BYTES]) -> Self {
        Self { secret: Arc::new(Secret::new(bytes)), tenant: None }
    }

    /// The key of a tenant, made from this, the master: always the same for the same name and generation.
    ///
    /// # Errors
    /// [`KeyError::NotMaster`].
    pub fn derive(&self, tenant: TenantId) -> Result<Self, KeyError> {
        use ring::hkdf::{HKDF_SHA256, Salt};
        if let Some(own) = self.tenant {
            return Err(KeyError::NotMaster(own));
        }
        let mut bytes = [0; KEY_BYTES];
        let info = tenant.encode();
        Salt::new(HKDF_SHA256, TENANT_SALT)
            .extract(self.bytes())
            .expand(&[&info], HKDF_SHA256)
            .and_then(|derived| derived.fill(&mut bytes))
            .expect("as many bytes as the hash has");
        let key = Self { secret: Arc::new(Secret::new(bytes)), tenant: Some(tenant) };
        bytes.fill(0);
        Ok(key)
    }

    /// Whose key it is; `None`: the master.
    #[must_use]
    pub fn tenant(&self) -> Option<TenantId> {
        self.tenant
    }

    /// The key with which a server that has this one proves itself to a client that says it is `tenant`, or
    /// speaks for it. `None`: it has none.
    #[must_use]
    pub fn towards(&self, tenant: Option<TenantId>) -> Option<Self> {
        match tenant {
            Some(tenant) if self.tenant.is_none() => self.derive(tenant).ok(),
            _ => (self.tenant == tenant).then(|| self.clone()),
        }
    }

    pub fn bytes(&self) -> &[u8; KEY_BYTES] {
        // SAFETY: it is mapped, and not written, for as long as there is a key.
        unsafe { self.secret.page.as_ref() }
    }

    /// Reads a key file.
    ///
    /// # Errors
    /// [`KeyError`]; a file that others than its owner may read is refused. Among the credentials that
    /// systemd hands to this service (`CREDENTIALS_DIRECTORY`), the group's right to read stands for the
    /// service's user.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let io = |source| KeyError::Io { operation: "read", path: path.to_owned(), source };
        let mut file = File::open(path).map_err(io)?;
        let mode = file.metadata().map_err(io)?.mode() & 0o777;
        let others = if is_credential(path) { mode & 0o037 } else { mode & 0o077 };
        if others != 0 {
            return Err(KeyError::Readable { path: path.to_owned(), mode });
        }
        let mut text = [0u8; 130];
        let mut len = 0;
        while len < text.len() {
            match file.read(&mut text[len..]).map_err(io)? {
                0 => break,
                n => len += n,
            }
        }
        parse(&text[..len]).ok_or_else(|| KeyError::Malformed { path: path.to_owned() })
    }

    /// The key with these 64 hexadecimal digits. `None`: they are something else.
    #[must_use]
    pub fn from_hex(digits: &str) -> Option<Self> {
        parse_hex(digits.as_bytes()).map(Self::from_bytes)
    }

    /// Its digits, for the process that is to have it.
    #[must_use]
    pub fn to_hex(&self) -> String {
        self.bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Writes the key to a new file of mode 0600; an existing file is left alone.
    ///
    /// # Errors
    /// [`KeyError::Io`], also where the file exists.
    pub fn save_new(&self, path: &Path) -> Result<(), KeyError> {
        let io = |source| KeyError::Io { operation: "write", path: path.to_owned(), source };
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(io)?;
        let of = self.tenant.map_or_else(String::new, |of| format!("{} {} ", of.name, of.generation));
        file.write_all(format!("{of}{}\n", self.to_hex()).as_bytes())
            .and_then(|()| file.sync_all())
            .map_err(io)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// Bytes from the kernel's random number generator.
///
/// # Panics
/// If the kernel has none to give.
pub fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut have = 0;
    while have < N {
        match rustix::rand::getrandom(&mut bytes[have..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => have += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("the kernel gives no random numbers: {error}"),
        }
    }
    bytes
}

/// Whether systemd has put this file there for this service alone. Such a file may belong to root and be
/// given to the service's user by an access list, whose mask then stands where the mode of other files has
/// the group's rights.
fn is_credential(path: &Path) -> bool {
    std::env::var_os("CREDENTIALS_DIRECTORY")
        .is_some_and(|directory| path.parent() == Some(Path::new(&directory)))
}

/// The content of a key file: digits, before them perhaps a tenant's name and generation.
fn parse(text: &[u8]) -> Option<Key> {
    let text = std::str::from_utf8(text).ok()?;
    let mut words = text.split_ascii_whitespace();
    let (first, second, third) = (words.next()?, words.next(), words.next());
    if words.next().is_some() {
        return None;
    }
    let (Some(generation), Some(digits)) = (second, third) else {
        return second.is_none().then(|| Key::from_hex(first)).flatten();
    };
    if !generation.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let name: TenantName = first.parse().ok()?;
    let tenant = Some(TenantId { name, generation: generation.parse().ok()? });
    Key::from_hex(digits).map(|key| Key { tenant, ..key })
}

fn parse_hex(text: &[u8]) -> Option<[u8; KEY_BYTES]> {
    let digits = std::str::from_utf8(text).ok()?;
    if digits.len() != 2 * KEY_BYTES || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    let mut key = [0; KEY_BYTES];
    for (byte, pair) in key.iter_mut().zip(text.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_key_file_comes_back_and_is_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pool.key");
        let key = Key::generate();
        key.save_new(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(Key::load(&path).unwrap(), key);
        assert!(
            matches!(Key::generate().save_new(&path), Err(KeyError::Io { .. })),
            "an existing key is not overwritten"
        );
        assert_eq!(Key::load(&path).unwrap(), key);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(Key::load(&path), Err(KeyError::Readable { mode: 0o640, .. })));
        assert_eq!(format!("{key:?}"), "Key(..)");
    }

    fn tenant(name: &str, generation: u32) -> TenantId {
        TenantId { name: name.parse().unwrap(), generation }
    }

    #[test]
    fn each_name_and_generation_has_a_key_of_its_own() {
        let master = Key::from_bytes([7; KEY_BYTES]);
        let alice = master.derive(tenant("alice", 1)).unwrap();
        // Fixed for ever: files of tenants are older than the servers that they come to. Computed with
        // Python's hmac, as RFC 5869 has it.
        assert_eq!(alice.to_hex(), "9835e2493ef66561859ceeb24c688b078d47f95d9629028ed8844156b3e046b5");
        let others = [tenant("alice", 2), tenant("alicf", 1), tenant("alic", 1), tenant("bob", 1)];
        for other in others {
            assert_ne!(master.derive(other).unwrap().bytes(), alice.bytes(), "{other}");
        }
        assert_ne!(Key::from_bytes([8; KEY_BYTES]).derive(tenant("alice", 1)).unwrap(), alice);
        assert!(
            matches!(alice.derive(tenant("bob", 1)), Err(KeyError::NotMaster(of)) if of == tenant("alice", 1))
        );
        // A tenant's key serves this tenant alone.
        assert_eq!(alice.towards(Some(tenant("alice", 1))), Some(alice.clone()));
        assert_eq!(master.towards(Some(tenant("alice", 1))), Some(alice.clone()));
        assert_eq!(master.towards(None), Some(master));
        for other in [Some(tenant("alice", 2)), Some(tenant("bob", 1)), None] {
            assert_eq!(alice.towards(other), None);
        }
    }

    #[test]
    fn a_tenants_key_file_names_the_tenant() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("alice.key");
        let key = Key::generate().derive(tenant("alice", 12)).unwrap();
        key.save_new(&path).unwrap();
        assert!(std::fs::read_to_string(&path).unwrap().starts_with("alice 12 "));
        assert_eq!(Key::load(&path).unwrap(), key);
        assert_eq!(Key::load(&path).unwrap().tenant(), Some(tenant("alice", 12)));
    }

    #[test]
    fn a_key_is_in_no_core_dump() {
        let key = Key::generate();
        let at = key.bytes().as_ptr().addr();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut within, mut flags) = (false, "");
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((from, to)) = range.and_then(|(from, to)| {
                Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
            }) {
                within = (from..to).contains(&at);
            }
            flags = line.strip_prefix("VmFlags:").filter(|_| within).unwrap_or(flags);
        }
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
        assert_eq!(Key::from_hex(&key.to_hex()), Some(key));
    }

    #[test]
    fn files_that_are_no_keys_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("empty", ""),
            ("short", "abcd"),
            ("word", &"x".repeat(64)),
            ("sign", &format!("+{}", "1".repeat(63))),
            ("long", &"a".repeat(500)),
            ("nameless", &format!("1 {}", "a".repeat(64))),
            ("misnamed", &format!("al/ice 1 {}", "a".repeat(64))),
            ("no number", &format!("alice x {}", "a".repeat(64))),
            ("signed", &format!("alice +1 {}", "a".repeat(64))),
            ("large", &format!("alice 4294967296 {}", "a".repeat(64))),
            ("more", &format!("alice 1 {} x", "a".repeat(64))),
        ] {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            assert!(matches!(Key::load(&path), Err(KeyError::Malformed { .. })), "{name}");
        }
    }
}
