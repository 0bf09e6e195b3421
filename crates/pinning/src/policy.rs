//! Which unused registration is ended first, when the allowance is exceeded: the one unused for longest.

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Links {
    before: u32,
    after: u32,
    listed: bool,
}

/// The one that has been unused for longest: a doubly linked list, every step of which takes constant time.
#[derive(Debug, Default)]
pub struct LeastRecentlyUsed {
    links: Vec<Links>,
    /// The one unused for longest, and the one used last.
    ends: Option<(u32, u32)>,
}

impl LeastRecentlyUsed {
    /// This registration is unused from now on. The call may be repeated; the last one counts.
    pub fn unused(&mut self, index: u32) {
        self.taken(index);
        if self.links.len() <= index as usize {
            self.links.resize(index as usize + 1, Links { before: NONE, after: NONE, listed: false });
        }
        let newest = self.ends.map_or(NONE, |(_, newest)| newest);
        self.links[index as usize] = Links { before: newest, after: NONE, listed: true };
        self.ends = Some(match self.ends {
            Some((oldest, newest)) => {
                self.links[newest as usize].after = index;
                (oldest, index)
            }
            None => (index, index),
        });
    }

    /// It is used again, or ended. Does nothing if it was not unused.
    pub fn taken(&mut self, index: u32) {
        let Some(Links { before, after, listed: true }) = self.links.get(index as usize).copied() else {
            return;
        };
        self.links[index as usize].listed = false;
        let (mut oldest, mut newest) = self.ends.expect("one is listed");
        match before {
            NONE => oldest = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => newest = before,
            after => self.links[after as usize].before = before,
        }
        self.ends = (oldest != NONE).then_some((oldest, newest));
    }

    /// The one to end first.
    pub fn victim(&self) -> Option<u32> {
        self.ends.map(|(oldest, _)| oldest)
    }
}
