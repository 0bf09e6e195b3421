//! Compares the cache with a naive model: a table that remembers for each page which frame was behind it when
//! it was registered, and frames that change under it.

use super::*;
use proptest::prelude::*;

const PAGES: u64 = 64;

fn span(first: u64, end: u64) -> Span {
    Span::new(PageIndex(first), PageIndex(end)).expect("a span has pages")
}

fn limits(allowance_pages: u64, registration_pages: u64, registrations: u32) -> Limits {
    Limits { allowance_pages, registration_pages, registrations }
}

fn lru(allowance: u64) -> PinCache {
    PinCache::new(limits(allowance, PAGES, 16))
}

/// What the kernel has, and the memory it refers to.
struct Model {
    cache: PinCache,
    /// The frame that is behind each page now.
    frames: Vec<u64>,
    next_frame: u64,
    /// By id: the span, and the frames that were behind its pages.
    table: Vec<(RegistrationId, Span, Vec<u64>)>,
    /// Which registration a look-up of the page must find.
    owner: Vec<Option<RegistrationId>>,
    making: Vec<(RegistrationId, Span)>,
    held: Vec<(Held, Span)>,
    /// Whether the model reports changed pages.
    tells: bool,
}

/// A stale hit: it would send pages that are no longer there.
#[derive(Debug, PartialEq)]
struct Stale(Span);

impl Model {
    fn new(cache: PinCache) -> Self {
        Self {
            cache,
            frames: (0..PAGES).collect(),
            next_frame: PAGES,
            table: Vec::new(),
            owner: vec![None; usize::try_from(PAGES).unwrap()],
            making: Vec::new(),
            held: Vec::new(),
            tells: true,
        }
    }

    fn pages(span: Span) -> std::ops::Range<usize> {
        usize::try_from(span.first().0).unwrap()..usize::try_from(span.end().0).unwrap()
    }

    /// Does what the cache orders.
    fn drain(&mut self) {
        while let Some(output) = self.cache.poll() {
            match output {
                Output::Register { id, span } => {
                    let frames = self.frames[Self::pages(span)].to_vec();
                    assert!(
                        !self.table.iter().any(|(other, _, _)| other.index == id.index),
                        "the place is free"
                    );
                    self.table.push((id, span, frames));
                    self.owner[Self::pages(span)].fill(Some(id));
                    let pinned: u64 = self.table.iter().map(|(_, span, _)| span.pages()).sum();
                    assert!(
                        pinned <= self.cache.limits().allowance_pages,
                        "{pinned} pages are pinned at once"
                    );
                }
                Output::Deregister { id, span } => {
                    assert!(
                        !self.held.iter().any(|(held, _)| held.registration() == id),
                        "what is in use stays registered"
                    );
                    let at =
                        self.table.iter().position(|(other, _, _)| *other == id).expect("it was registered");
                    assert_eq!(self.table.swap_remove(at).1, span);
                    self.owner.iter_mut().filter(|owner| **owner == Some(id)).for_each(|owner| *owner = None);
                }
            }
        }
    }

    fn examine(&self, held: &Held, span: Span) -> Result<(), Stale> {
        let (_, whole, frames) =
            self.table.iter().find(|(id, _, _)| *id == held.registration()).expect("it is registered");
        assert_eq!(whole.first().0 + held.offset_pages(), span.first().0);
        assert!(whole.covers(&span));
        let from = usize::try_from(held.offset_pages()).unwrap();
        let then = &frames[from..from + usize::try_from(span.pages()).unwrap()];
        if then == &self.frames[Self::pages(span)] { Ok(()) } else { Err(Stale(span)) }
    }

    fn ask(&mut self, span: Span, finish: bool) -> Result<(), Stale> {
        let owners = &self.owner[Self::pages(span)];
        let made = |id: RegistrationId| !self.making.iter().any(|(making, _)| *making == id);
        let expected = owners[0].filter(|id| made(*id) && owners.iter().all(|owner| *owner == Some(*id)));
        let found = self.cache.look_up(span);
        assert_eq!(found.as_ref().map(Held::registration), expected, "{span:?}");
        if let Some(held) = found {
            self.examine(&held, span)?;
            self.held.push((held, span));
            return Ok(());
        }
        let before = self.cache.pinned_pages();
        let Ok(id) = self.cache.admit(span) else {
            assert_eq!(
                (self.cache.pinned_pages(), self.cache.poll()),
                (before, None),
                "what is refused changes nothing"
            );
            return Ok(());
        };
        self.making.push((id, span));
        self.drain();
        if finish { self.finish(self.making.len() - 1, true) } else { Ok(()) }
    }

    fn finish(&mut self, which: usize, worked: bool) -> Result<(), Stale> {
        if self.making.is_empty() {
            return Ok(());
        }
        let (id, span) = self.making.swap_remove(which % self.making.len());
        if !worked {
            self.cache.refused(id);
            self.table.retain(|(other, _, _)| *other != id);
            self.owner.iter_mut().filter(|owner| **owner == Some(id)).for_each(|owner| *owner = None);
        } else if let Some(held) = self.cache.registered(id) {
            self.examine(&held, span)?;
            self.held.push((held, span));
        }
        self.drain();
        Ok(())
    }

    fn change(&mut self, span: Span) {
        for page in Self::pages(span) {
            self.frames[page] = self.next_frame;
            self.next_frame += 1;
        }
        if self.tells {
            self.cache.invalidate(span);
            self.owner[Self::pages(span)].fill(None);
            self.drain();
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Ask(Span, bool),
    Finish(usize, bool),
    Release(usize),
    Change(Span),
    Allow(u64),
    UnpinUnused,
}

fn spans() -> impl Strategy<Value = Span> {
    (0..PAGES, 1..=20u64).prop_map(|(first, pages)| span(first, (first + pages).min(PAGES)))
}

fn steps() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (spans(), prop::bool::weighted(0.85)).prop_map(|(span, finish)| Step::Ask(span, finish)),
        2 => (any::<usize>(), prop::bool::weighted(0.8))
            .prop_map(|(which, worked)| Step::Finish(which, worked)),
        7 => any::<usize>().prop_map(Step::Release),
        3 => spans().prop_map(Step::Change),
        1 => (PAGES / 2..PAGES * 2).prop_map(Step::Allow),
        1 => Just(Step::UnpinUnused),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_look_up_finds_pages_that_are_gone(
        (allowance, most, places) in (20..100u64, 8..40u64, 2..9u32),
        steps in prop::collection::vec(steps(), 1..120),
    ) {
        let mut model = Model::new(PinCache::new(limits(allowance, most, places)));
        for step in steps {
            match step {
                Step::Ask(span, finish) => prop_assert_eq!(model.ask(span, finish), Ok(())),
                Step::Finish(which, worked) => prop_assert_eq!(model.finish(which, worked), Ok(())),
                Step::Release(which) if !model.held.is_empty() => {
                    let (held, _) = model.held.swap_remove(which % model.held.len());
                    model.cache.release(held);
                }
                Step::Release(_) => {}
                Step::Change(span) => model.change(span),
                // Below the pages in use it has to wait for the uses to end, which `check` allows and `drain`
                // does not.
                Step::Allow(pages) => model.cache.allow(pages.max(model.cache.used_pages())),
                Step::UnpinUnused => model.cache.unpin_unused(),
            }
            model.drain();
            model.cache.check();
        }
        // Everything ends.
        while !model.making.is_empty() {
            prop_assert_eq!(model.finish(0, true), Ok(()));
        }
        for (held, _) in std::mem::take(&mut model.held) {
            model.cache.release(held);
        }
        model.cache.unpin_unused();
        model.drain();
        model.cache.check();
        prop_assert!(model.table.is_empty() && model.cache.live() == 0 && model.cache.pinned_pages() == 0);
    }
}

#[test]
fn without_being_told_it_would_find_pages_that_are_gone() {
    for tells in [false, true] {
        let mut model = Model::new(lru(PAGES));
        model.tells = tells;
        model.ask(span(0, 4), true).unwrap();
        let (held, _) = model.held.pop().unwrap();
        model.cache.release(held);
        model.change(span(2, 3));
        assert_eq!(model.ask(span(1, 4), true).is_ok(), tells);
    }
}

/// Registers a span and lets it go.
fn touch(cache: &mut PinCache, span: Span) -> Vec<Output> {
    let mut outputs = Vec::new();
    let held = cache.look_up(span).unwrap_or_else(|| {
        let id = cache.admit(span).expect("there is room");
        outputs.extend(std::iter::from_fn(|| cache.poll()));
        cache.registered(id).expect("nothing came in between")
    });
    cache.release(held);
    outputs.extend(std::iter::from_fn(|| cache.poll()));
    outputs
}

fn ended(outputs: &[Output]) -> Vec<Span> {
    outputs
        .iter()
        .filter_map(|output| if let Output::Deregister { span, .. } = output { Some(*span) } else { None })
        .collect()
}

#[test]
fn unused_memory_stays_registered_until_the_allowance_is_passed_and_the_longest_unused_goes_first() {
    let mut cache = lru(12);
    for first in [0, 10, 20] {
        assert_eq!(ended(&touch(&mut cache, span(first, first + 4))), []);
    }
    assert_eq!(touch(&mut cache, span(0, 4)), [], "a hit needs no kernel");
    assert_eq!(ended(&touch(&mut cache, span(30, 31))), [span(10, 14)]);
    assert_eq!(ended(&touch(&mut cache, span(40, 46))), [span(20, 24)]);
    assert_eq!((cache.counts().hits, cache.counts().registered, cache.counts().unpinned), (1, 5, 2));
}

#[test]
fn ranges_that_overlap_are_merged_and_ranges_with_holes_are_split() {
    let mut cache = lru(PAGES);
    touch(&mut cache, span(0, 4));
    touch(&mut cache, span(6, 10));
    let merged = touch(&mut cache, span(3, 7));
    assert_eq!(ended(&merged), [span(0, 4), span(6, 10)]);
    assert!(matches!(merged.last(), Some(Output::Register { span: whole, .. }) if *whole == span(0, 10)));
    assert_eq!(touch(&mut cache, span(0, 10)), []);
    // A hole leaves two parts, both of which are found; when more than half is gone, the registration ends.
    cache.invalidate(span(4, 5));
    assert_eq!((touch(&mut cache, span(0, 4)), touch(&mut cache, span(5, 10))), (vec![], vec![]));
    assert!(cache.look_up(span(3, 5)).is_none() && cache.look_up(span(3, 6)).is_none());
    cache.invalidate(span(0, 4));
    assert_eq!(cache.poll(), None, "half of it can be found");
    cache.invalidate(span(9, 10));
    assert!(matches!(cache.poll(), Some(Output::Deregister { span: whole, .. }) if whole == span(0, 10)));
    cache.check();
}

#[test]
fn what_is_in_use_is_deregistered_when_its_last_use_ends() {
    let mut cache = lru(8);
    touch(&mut cache, span(0, 8));
    let (one, two) = (cache.look_up(span(0, 8)).unwrap(), cache.look_up(span(2, 3)).unwrap());
    cache.invalidate_all();
    assert_eq!(cache.admit(span(20, 21)), Err(Refused::Allowance { wanted: 1, allowance: 8, used: 8 }));
    cache.release(one);
    assert_eq!(cache.poll(), None);
    cache.release(two);
    assert!(matches!(cache.poll(), Some(Output::Deregister { .. })));
    cache.check();
}

#[test]
fn what_is_invalidated_while_it_is_being_registered_is_not_used() {
    let mut cache = lru(PAGES);
    let id = cache.admit(span(0, 4)).unwrap();
    cache.invalidate(span(3, 4));
    assert!(cache.registered(id).is_none());
    // The rest of it is found.
    assert_eq!(cache.look_up(span(0, 3)).map(|held| held.registration()), Some(id));
}

#[test]
fn what_cannot_be_registered_says_why_and_changes_nothing() {
    let mut cache = PinCache::new(limits(8, 4, 2));
    assert_eq!(cache.admit(span(0, 5)), Err(Refused::TooLarge { pages: 5, most: 4 }));
    let held: Vec<Held> = [0, 10]
        .into_iter()
        .map(|first| {
            let id = cache.admit(span(first, first + 1)).unwrap();
            cache.registered(id).unwrap()
        })
        .collect();
    assert_eq!(cache.admit(span(20, 21)), Err(Refused::Places(2)));
    // A merge that would be too long does not happen.
    let [one, two] = <[Held; 2]>::try_from(held).unwrap();
    cache.release(one);
    cache.release(two);
    let id = cache.admit(span(10, 14)).unwrap();
    assert!(
        std::iter::from_fn(|| cache.poll())
            .any(|output| matches!(output, Output::Register { span: whole, .. } if whole == span(10, 14)))
    );
    cache.refused(id);
    assert_eq!(cache.look_up(span(10, 11)), None, "what the kernel refused is not found");
    cache.check();
}

#[test]
fn bytes_touch_whole_pages() {
    assert_eq!(Span::of_bytes(4095, 2, 4096), Some(span(0, 2)));
    assert_eq!(Span::of_bytes(4096, 4096, 4096), Some(span(1, 2)));
    assert_eq!(Span::of_bytes(1, 0, 4096), None);
    assert_eq!(Span::of_bytes(u64::MAX, 2, 4096), None);
}
