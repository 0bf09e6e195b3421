//! What `stat` tells of a file.

use std::time::SystemTime;

/// What has attributes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    File,
    Directory,
    Link,
    /// A pipe, a socket or a device: its type's bits of a mode, and which device.
    Special {
        mode: u32,
        device: u32,
    },
}

/// Who makes a file, and with which permissions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner {
    pub user: u32,
    pub group: u32,
    /// The lowest 12 bits of a mode.
    pub permissions: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attributes {
    pub number: u64,
    pub kind: Kind,
    pub bytes: u64,
    /// Pages of the pool that it has.
    pub pages: u64,
    pub links: u32,
    pub owner: Owner,
    pub read: SystemTime,
    pub written: SystemTime,
    pub changed: SystemTime,
}

/// What is to be other attributes. Those that are `None` stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Change {
    pub permissions: Option<u16>,
    pub user: Option<u32>,
    pub group: Option<u32>,
    pub bytes: Option<u64>,
    pub read: Option<SystemTime>,
    pub written: Option<SystemTime>,
    pub changed: Option<SystemTime>,
}
