//! The kernel's events about mappings, as changes to be put in order.

use rampool_kernel::uffd::{Event, Uffd};
use rampool_paging::changes::{Change, Order};

/// What an event says of a change; `None` for a fault.
pub(crate) fn change_of(event: &Event) -> Option<Change> {
    Some(match *event {
        Event::Fault { .. } => return None,
        Event::Fork { .. } => Change::Fork,
        Event::Remap { from, to, bytes } => Change::Move { from, to, bytes },
        Event::Remove { start, end } => Change::GiveUp { start, end },
        Event::Unmap { start, end } => Change::Unmap { start, end },
    })
}

/// The contexts of children that events tell of.
pub(crate) fn born_of(events: &[Event]) -> impl Iterator<Item = &Uffd> {
    events.iter().filter_map(|event| if let Event::Fork { child } = event { Some(child) } else { None })
}

/// Takes the changes out of `events`, and puts them into `order`.
pub(crate) fn in_order(changes: Vec<Event>, order: &Order) -> Vec<Event> {
    let mut changes: Vec<Option<Event>> = changes.into_iter().map(Some).collect();
    order.steps.iter().map(|step| changes[*step].take().expect("each change once")).collect()
}

/// Takes the changes out of what was read.
pub(crate) fn take_changes(events: &mut Vec<Event>) -> Vec<Event> {
    events.extract_if(.., |event| change_of(event).is_some()).collect()
}

/// The last message of a program that ends because of `reason`.
#[must_use]
pub fn broken_text(reason: &str) -> String {
    format!(
        "{reason}. Ending the program rather than letting it go on with wrong data; this is a fault of \
         rampool or of the kernel, please report it."
    )
}
