//! A lease's space against a model that copies everything and shares nothing.

use super::*;
use proptest::prelude::*;
use rampool_wire::frame::REMEMBERED;
use rampool_wire::units::PageIndex;
use std::collections::BTreeSet;

#[derive(Clone, Debug)]
enum Step {
    Create { member: u64 },
    Clone { member: u64, region: usize },
    CloneSome { member: u64, region: usize },
    Reconnect { member: u64 },
    Adopt { member: u64, region: usize },
    Open { member: u64, region: usize },
    Free { member: u64, region: usize },
    Put { member: u64, region: usize, extents: Vec<(u64, u32)>, zero_bits: u64, charge: u16 },
    Discard { member: u64, region: usize, extents: Vec<(u64, u32)> },
    Gone { member: u64 },
    Resize { bytes: u64 },
}

fn extents() -> impl Strategy<Value = Vec<(u64, u32)>> {
    // Few chunks and few pages, around chunk borders, so that steps meet.
    let first = prop_oneof![0..12u64, 505..520u64, 1020..1030u64, Just((1 << 40) - 8)];
    prop::collection::vec((first, 1..8u32), 1..4)
}

fn long_extents() -> impl Strategy<Value = Vec<(u64, u32)>> {
    prop_oneof![extents(), Just(vec![(0, 1024)]), Just(vec![(3, 1500)]), Just(vec![(0, u32::MAX)])]
}

fn step() -> impl Strategy<Value = Step> {
    let member = || 1..4u64;
    let region = || 0..6usize;
    let charge = prop_oneof![Just(4096u16), Just(256), Just(1024)];
    prop_oneof![
        1 => member().prop_map(|member| Step::Create { member }),
        2 => (member(), region()).prop_map(|(member, region)| Step::Clone { member, region }),
        4 => (member(), region()).prop_map(|(member, region)| Step::CloneSome { member, region }),
        1 => member().prop_map(|member| Step::Reconnect { member }),
        1 => (member(), region()).prop_map(|(member, region)| Step::Adopt { member, region }),
        1 => (member(), region()).prop_map(|(member, region)| Step::Open { member, region }),
        1 => (member(), region()).prop_map(|(member, region)| Step::Free { member, region }),
        8 => (member(), region(), extents(), any::<u64>(), charge)
            .prop_map(|(member, region, extents, zero_bits, charge)| {
                Step::Put { member, region, extents, zero_bits, charge }
            }),
        3 => (member(), region(), long_extents())
            .prop_map(|(member, region, extents)| Step::Discard { member, region, extents }),
        1 => member().prop_map(|member| Step::Gone { member }),
        1 => (100_000..2_000_000u64).prop_map(|bytes| Step::Resize { bytes }),
    ]
}

/// What the pages should be: every region holds its own map.
#[derive(Default)]
struct Model {
    regions: BTreeMap<RegionId, (Option<MemberId>, BTreeMap<PageIndex, StoredPage>)>,
    /// What each member's clone that is being made is of: a region, and its pages when it began.
    clones: BTreeMap<MemberId, (RegionId, BTreeMap<PageIndex, StoredPage>)>,
    live: BTreeSet<FrameIndex>,
    next_frame: u64,
}

impl Model {
    fn named(&self) -> BTreeMap<FrameIndex, u16> {
        let of_regions = self.regions.values().map(|(_, pages)| pages);
        let of_clones = self.clones.values().map(|(_, pages)| pages);
        of_regions.chain(of_clones).flat_map(BTreeMap::values).map(|p| (p.frame, p.charge)).collect()
    }

    /// Returns the frames that are left, if every member may know of them.
    fn put(&mut self, id: RegionId, numbers: &[PageIndex], pages: &[Option<StoredPage>]) -> Vec<FrameIndex> {
        let (owner, table) = self.regions.get_mut(&id).unwrap();
        let mut left = Vec::new();
        for (number, page) in numbers.iter().zip(pages) {
            let old = match page {
                Some(page) => {
                    self.live.insert(page.frame);
                    table.insert(*number, *page)
                }
                None => table.remove(number),
            };
            left.extend(old.filter(|_| owner.is_none()).map(|page| page.frame));
        }
        left
    }

    /// As [`Model::put`].
    fn discard(&mut self, id: RegionId, extents: &[Extent]) -> Vec<FrameIndex> {
        let (owner, table) = self.regions.get_mut(&id).unwrap();
        let given_up = table.extract_if(.., |page, _| extents.iter().any(|e| e.contains(*page)));
        given_up.filter(|_| owner.is_none()).map(|(_, page)| page.frame).collect()
    }

    /// Every frame that was released was live, and live frames are exactly those that some page is in.
    fn settle(&mut self, released: &[FrameIndex]) {
        for frame in released {
            assert!(self.live.remove(frame), "{frame:?} was released twice, or never stored");
        }
        assert_eq!(self.live, self.named().into_keys().collect());
    }
}

fn list(extents: &[(u64, u32)]) -> Vec<Extent> {
    extents.iter().map(|(first, count)| Extent::new(PageIndex(*first), *count)).collect()
}

fn run(steps: Vec<Step>, limit: u64) {
    let mut space = LeaseSpace::new(limit);
    for member in 1..4 {
        space.member_joined(MemberId(member), ConnectionNumber::FIRST);
    }
    let mut model = Model::default();
    for step in steps {
        let mut released = Vec::new();
        let mut left = Vec::new();
        let pick = |model: &Model, index: usize| {
            model.regions.keys().nth(index).copied().unwrap_or(RegionId(999_999))
        };
        let may = |model: &Model, member: u64, region: RegionId| match model.regions.get(&region) {
            None => Err(SpaceError::NoSuchRegion),
            Some((Some(owner), _)) if *owner != MemberId(member) => Err(SpaceError::NotOwner),
            Some(_) => Ok(()),
        };
        match step {
            Step::Create { member } => {
                let id = space.create_region(MemberId(member)).unwrap();
                assert!(model.regions.insert(id, (Some(MemberId(member)), BTreeMap::new())).is_none());
            }
            Step::Clone { member, region } => {
                let region = pick(&model, region);
                model.clones.remove(&MemberId(member));
                match space.clone_region(MemberId(member), region) {
                    Ok(id) => {
                        may(&model, member, region).unwrap();
                        let pages = model.regions[&region].1.clone();
                        model.regions.insert(id, (Some(MemberId(member)), pages));
                    }
                    Err(SpaceError::Full { .. }) => {}
                    Err(error) => assert_eq!(Err(error), may(&model, member, region)),
                }
            }
            Step::CloneSome { member, region } => {
                let me = MemberId(member);
                // It goes on with what it has begun.
                let region = model.clones.get(&me).map_or_else(|| pick(&model, region), |(of, _)| *of);
                let begun = model.clones.contains_key(&me).then(|| model.clones.remove(&me).expect("seen").1);
                match space.clone_some(me, region, 1) {
                    Ok(done) => {
                        may(&model, member, region).unwrap();
                        let pages = begun.unwrap_or_else(|| model.regions[&region].1.clone());
                        match done {
                            None => drop(model.clones.insert(me, (region, pages))),
                            Some(id) => drop(model.regions.insert(id, (Some(me), pages))),
                        }
                    }
                    Err(SpaceError::Full { .. }) => {}
                    Err(error) => assert_eq!(Err(error), may(&model, member, region)),
                }
            }
            Step::Reconnect { member } => {
                space.member_joined(MemberId(member), ConnectionNumber::FIRST);
                model.clones.remove(&MemberId(member));
            }
            Step::Adopt { member, region } => {
                let region = pick(&model, region);
                let result = space.adopt_region(MemberId(member), region);
                match model.regions.get_mut(&region) {
                    Some((owner, _)) => {
                        result.unwrap();
                        *owner = Some(MemberId(member));
                    }
                    None => assert_eq!(result, Err(SpaceError::NoSuchRegion)),
                }
            }
            Step::Open { member, region } => {
                let region = pick(&model, region);
                match space.open_region(MemberId(member), RegionSelector::Region(region), 1 << 20) {
                    Ok(opened) => {
                        assert_eq!(opened, (region, 1 << 20));
                        may(&model, member, region).unwrap();
                        model.regions.get_mut(&region).unwrap().0 = None;
                    }
                    Err(error) => assert_eq!(Err(error), may(&model, member, region)),
                }
            }
            Step::Free { member, region } => {
                let region = pick(&model, region);
                let result = space.free_region(MemberId(member), region);
                assert_eq!(result, may(&model, member, region));
                if result.is_ok() {
                    model.regions.remove(&region);
                    model.clones.retain(|_, (of, _)| *of != region);
                }
            }
            Step::Put { member, region, extents, zero_bits, charge } => {
                let region = pick(&model, region);
                let extents = list(&extents);
                let numbers: Vec<PageIndex> = extents.iter().flat_map(Extent::pages).collect();
                let pages: Vec<_> = (0..numbers.len())
                    .map(|i| {
                        model.next_frame += 1;
                        let frame = FrameIndex(model.next_frame);
                        (zero_bits >> i & 1 == 0).then_some(StoredPage { frame, crc: 5, len: charge, charge })
                    })
                    .collect();
                match space.put(MemberId(member), region, &extents, &pages, &mut released) {
                    Ok(()) => {
                        may(&model, member, region).unwrap();
                        left = model.put(region, &numbers, &pages);
                    }
                    Err(SpaceError::Full { free }) => {
                        // It may refuse only what could, at worst, not have fitted.
                        let new: u64 = pages.iter().flatten().map(|p| u64::from(p.charge)).sum();
                        let tables = (numbers.len() as u64) * (CHUNK_BYTES + 64);
                        assert!(new + tables > free, "refused {new} bytes with {free} free");
                    }
                    Err(error) => assert_eq!(Err(error), may(&model, member, region)),
                }
            }
            Step::Discard { member, region, extents } => {
                let region = pick(&model, region);
                let extents = list(&extents);
                match space.discard(MemberId(member), region, &extents, &mut released) {
                    Ok(()) => {
                        may(&model, member, region).unwrap();
                        left = model.discard(region, &extents);
                    }
                    Err(SpaceError::Full { .. }) => {}
                    Err(error) => assert_eq!(Err(error), may(&model, member, region)),
                }
            }
            Step::Gone { member } => {
                space.member_gone(MemberId(member));
                model.regions.retain(|_, (owner, _)| *owner != Some(MemberId(member)));
                model.clones.remove(&MemberId(member));
                model.clones.retain(|_, (of, _)| model.regions.contains_key(of));
                assert_eq!(space.create_region(MemberId(member)), Err(SpaceError::MemberGone));
                space.member_joined(MemberId(member), ConnectionNumber::FIRST);
            }
            Step::Resize { bytes } => {
                let used = space.usage().used_bytes;
                if space.set_limit(bytes).is_err() {
                    assert!(used + CHUNK_BYTES * 64 > bytes, "{used} bytes in use do not fit {bytes}");
                }
            }
        }
        space.check();
        left.sort_unstable();
        let mut told: Vec<FrameIndex> = space.left().collect();
        told.sort_unstable();
        assert_eq!(told, left);
        while space.bury(1, &mut released) {}
        assert!(!space.has_freed());
        space.check();
        model.settle(&released);
        let frames: u64 = model.named().values().map(|charge| u64::from(*charge)).sum();
        assert!(space.usage().used_bytes >= frames && frames <= space.usage().limit_bytes);
        for (region, (owner, pages)) in &model.regions {
            let window = [Extent::new(PageIndex(0), 1040), Extent::new(PageIndex((1 << 40) - 8), 8)];
            let mut found = Vec::new();
            let reader = owner.unwrap_or(MemberId(2));
            space.look_up(reader, *region, &window, &mut found).unwrap();
            let mut view = space.view(reader, *region).unwrap();
            let viewed: Vec<_> = window.iter().flat_map(Extent::pages).map(|p| view.page(p)).collect();
            assert_eq!(viewed, found);
            for number in window.iter().flat_map(Extent::pages) {
                let state = space.page_state(reader, *region, number).unwrap();
                match (pages.get(&number), state) {
                    (None, PageState::Zero) => {}
                    (Some(page), PageState::Own(found)) => {
                        assert_eq!(found, *page);
                        let names = model
                            .regions
                            .values()
                            .filter(|(_, pages)| pages.values().any(|p| p.frame == page.frame));
                        assert_eq!(names.count(), 1, "another region names it");
                        let mut clones = model.clones.values();
                        let named = clones.any(|(_, pages)| pages.values().any(|p| p.frame == page.frame));
                        assert!(!named, "a clone is to have it");
                    }
                    (Some(page), PageState::Shared(found)) => assert_eq!(found, *page),
                    other => panic!("{other:?}"),
                }
            }
            let want: Vec<_> =
                window.iter().flat_map(Extent::pages).map(|p| pages.get(&p).copied()).collect();
            assert_eq!(found, want);
        }
    }
    let mut released = Vec::new();
    space.close();
    space.bury(u64::MAX, &mut released);
    space.check();
    model.regions.clear();
    model.clones.clear();
    model.settle(&released);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn a_space_is_what_a_model_without_sharing_says(steps in prop::collection::vec(step(), 1..80)) {
        run(steps, 1_500_000);
    }

    #[test]
    fn a_space_that_is_nearly_full_keeps_its_promises(steps in prop::collection::vec(step(), 1..80)) {
        run(steps, 120_000);
    }
}

fn page(frame: u64) -> Option<StoredPage> {
    Some(StoredPage { frame: FrameIndex(frame), crc: 1, len: 4096, charge: 4096 })
}

const ME: MemberId = MemberId(1);

#[test]
fn a_full_lease_still_takes_pages_in_place_of_others() {
    let mut space = LeaseSpace::new(4 * 4096);
    space.member_joined(ME, ConnectionNumber::FIRST);
    let region = space.create_region(ME).unwrap();
    let four = [Extent::new(PageIndex(0), 4)];
    let mut released = Vec::new();
    space.put(ME, region, &four, &[page(1), page(2), page(3), page(4)], &mut released).unwrap();
    let fifth = [Extent::page(PageIndex(9))];
    assert_eq!(space.put(ME, region, &fifth, &[page(5)], &mut released), Err(SpaceError::Full { free: 0 }));
    space.put(ME, region, &four, &[page(6), page(7), page(8), page(9)], &mut released).unwrap();
    assert_eq!(released, [1, 2, 3, 4].map(FrameIndex));
    released.clear();
    space.put(ME, region, &[Extent::page(PageIndex(0))], &[None], &mut released).unwrap();
    space.put(ME, region, &fifth, &[page(10)], &mut released).unwrap();
    space.check();
}

#[test]
fn a_request_that_does_not_fit_stores_nothing() {
    let mut space = LeaseSpace::new(3 * 4096);
    space.member_joined(ME, ConnectionNumber::FIRST);
    let region = space.create_region(ME).unwrap();
    let mut released = Vec::new();
    let four = [Extent::new(PageIndex(0), 4)];
    let result = space.put(ME, region, &four, &[page(1), page(2), page(3), page(4)], &mut released);
    assert_eq!(result, Err(SpaceError::Full { free: 3 * 4096 }));
    assert_eq!((space.usage().pages, released.len()), (0, 0));
}

#[test]
fn a_clone_costs_no_frames_and_sees_the_past() {
    let mut space = LeaseSpace::new(1 << 30);
    space.member_joined(ME, ConnectionNumber::FIRST);
    let region = space.create_region(ME).unwrap();
    let mut released = Vec::new();
    for chunk in 0..64 {
        let pages: Vec<_> = (0..512).map(|i| page(chunk * 512 + i)).collect();
        space.put(ME, region, &[Extent::new(PageIndex(chunk * 512), 512)], &pages, &mut released).unwrap();
    }
    let before = space.usage().used_bytes;
    let copy = space.clone_region(ME, region).unwrap();
    assert_eq!(space.usage().used_bytes, before);
    space.put(ME, region, &[Extent::page(PageIndex(5))], &[page(99_999)], &mut released).unwrap();
    assert_eq!(released, [], "the copy still names the old frame");
    assert_eq!(space.usage().used_bytes, before + 4096);
    let child = MemberId(2);
    assert_eq!(space.adopt_region(child, copy), Err(SpaceError::MemberGone));
    space.member_joined(child, ConnectionNumber::FIRST);
    space.adopt_region(child, copy).unwrap();
    assert_eq!(space.look_up(ME, copy, &[], &mut Vec::new()), Err(SpaceError::NotOwner));
    let mut found = Vec::new();
    space.look_up(child, copy, &[Extent::page(PageIndex(5))], &mut found).unwrap();
    assert_eq!(found, [page(5)]);
    space.member_gone(ME);
    space.bury(u64::MAX, &mut released);
    assert_eq!(released, [FrameIndex(99_999)]);
    space.member_gone(child);
    space.bury(u64::MAX, &mut released);
    assert_eq!(released.len(), 64 * 512 + 1);
    space.check();
}

/// One page in each of many chunks: the tables would cost twice the pages, for nothing, if they were free.
#[test]
fn no_client_makes_the_server_hold_tables_for_pages_it_does_not_hold() {
    let limit = 64 << 20;
    let mut space = LeaseSpace::new(limit);
    space.member_joined(ME, ConnectionNumber::FIRST);
    let region = space.create_region(ME).unwrap();
    let mut put = 0u64;
    while space.put(ME, region, &[Extent::page(PageIndex(put * 512))], &[page(put)], &mut Vec::new()).is_ok()
    {
        put += 1;
    }
    let usage = space.usage();
    assert!(
        put * 4096 + usage.metadata_bytes <= limit + limit / 64 + (1 << 20),
        "{put} pages, {} bytes of tables",
        usage.metadata_bytes
    );
    let mut clones = 0u64;
    while space.clone_region(ME, region).is_ok() {
        clones += 1;
    }
    assert!(clones < 20, "{clones} copies of a large table were free");
    space.check();
}

#[test]
fn what_comes_over_a_replaced_connection_is_told_apart_and_a_repeated_request_makes_no_second_region() {
    let mut directory = crate::Directory::new(crate::Limits {
        memory_bytes: 1 << 20,
        grace_ms: 1,
        max_leases: 1,
        max_members: 1,
    });
    let token = rampool_wire::frame::LeaseToken([1; 16]);
    let open =
        rampool_wire::frame::OpenLease { bytes: 1 << 20, pid: 1, name: String::new(), host: String::new() };
    let (lease, member) = directory.open(None, &open, token).unwrap();
    let back = rampool_wire::frame::AttachLease {
        lease,
        token,
        member,
        pid: 1,
        name: String::new(),
        host: String::new(),
    };
    let (_, second, _) = directory.attach(None, &back).unwrap();
    assert!(
        directory.is_current(lease, member, second)
            && !directory.is_current(lease, member, ConnectionNumber::FIRST)
    );

    let made = |space: &mut LeaseSpace,
                request: u64,
                make: &dyn Fn(&mut LeaseSpace) -> Result<RegionId, SpaceError>| {
        let made = space.make_once(member, request, |space| make(space).map(Some));
        made.map(|made| made.expect("it is made at once"))
    };
    let mut space = LeaseSpace::new(1 << 20);
    assert_eq!(space.admit(member, second), Err(SpaceError::MemberGone));
    space.member_joined(member, ConnectionNumber::FIRST);
    let region = made(&mut space, 7, &|space| space.create_region(member)).unwrap();
    assert_eq!(space.admit(member, ConnectionNumber::FIRST), Ok(()));
    space.member_joined(member, second);
    assert_eq!(
        (space.admit(member, ConnectionNumber::FIRST), space.admit(member, second)),
        (Err(SpaceError::Replaced), Ok(()))
    );
    assert_eq!(made(&mut space, 7, &|space| space.create_region(member)), Ok(region));
    let copy = made(&mut space, 8, &|space| space.clone_region(member, region)).unwrap();
    assert_ne!(copy, region);
    assert_eq!(space.usage().regions, 2);
    // What was freed since is not handed out again.
    space.free_region(member, copy).unwrap();
    assert!(!space.bury(u64::MAX, &mut Vec::new()));
    assert_ne!(made(&mut space, 8, &|space| space.clone_region(member, region)), Ok(copy));
    space.member_gone(member);
    space.bury(u64::MAX, &mut Vec::new());
    assert_eq!(made(&mut space, 9, &|space| space.create_region(member)), Err(SpaceError::MemberGone));
    space.check();
}

#[test]
fn a_clone_in_steps_is_of_the_moment_when_it_began() {
    let mut space = LeaseSpace::new(1 << 30);
    space.member_joined(ME, ConnectionNumber::FIRST);
    let region = space.create_region(ME).unwrap();
    let mut released = Vec::new();
    let first_of = |chunk: u64| Extent::page(PageIndex(chunk * 512));
    for chunk in 0..16 {
        space.put(ME, region, &[first_of(chunk)], &[page(chunk)], &mut released).unwrap();
    }
    assert_eq!(space.clone_some(ME, region, 2), Ok(None));
    space.check();
    // Before its turn a chunk goes as a whole, becomes empty, is changed, goes and comes again, or is new.
    space.discard(ME, region, &[Extent::new(PageIndex(3 * 512), 512)], &mut released).unwrap();
    space.discard(ME, region, &[first_of(4)], &mut released).unwrap();
    space.put(ME, region, &[first_of(5)], &[page(105)], &mut released).unwrap();
    space.discard(ME, region, &[Extent::new(PageIndex(6 * 512), 512)], &mut released).unwrap();
    space.put(ME, region, &[first_of(6)], &[page(106)], &mut released).unwrap();
    space.put(ME, region, &[first_of(20)], &[page(120)], &mut released).unwrap();
    // And after it.
    space.put(ME, region, &[first_of(0)], &[page(100)], &mut released).unwrap();
    space.check();
    assert_eq!(released, [], "the clone is to have what was replaced");
    let copy = std::iter::from_fn(|| Some(space.clone_some(ME, region, 2).unwrap())).find_map(|done| done);
    let copy = copy.unwrap();
    space.check();
    for chunk in 0..32 {
        let mut found = Vec::new();
        space.look_up(ME, copy, &[first_of(chunk)], &mut found).unwrap();
        assert_eq!(found, [page(chunk).filter(|_| chunk < 16)], "chunk {chunk}");
    }
    // What is given up halfway leaves nothing.
    assert_eq!(space.clone_some(ME, copy, 3), Ok(None));
    space.discard(ME, copy, &[first_of(9)], &mut released).unwrap();
    space.member_joined(ME, ConnectionNumber::FIRST);
    assert!(space.has_freed());
    space.free_region(ME, copy).unwrap();
    space.free_region(ME, region).unwrap();
    assert!(!space.bury(u64::MAX, &mut released));
    space.check();
    assert_eq!(space.usage(), SpaceUsage { limit_bytes: 1 << 30, ..SpaceUsage::default() });
}

#[test]
fn a_region_with_a_name_is_one_region_for_all_members_and_outlives_them() {
    let mut space = LeaseSpace::new(1 << 20);
    let you = MemberId(2);
    for member in [ME, you] {
        space.member_joined(member, ConnectionNumber::FIRST);
    }
    assert_eq!(space.open_region(you, RegionSelector::Name("orders"), 0), Err(SpaceError::NoSuchRegion));
    let (orders, bytes) = space.open_region(ME, RegionSelector::Name("orders"), 10_000).unwrap();
    assert_eq!(
        (space.open_region(you, RegionSelector::Name("orders"), 0), bytes),
        (Ok((orders, 10_000)), 10_000)
    );
    assert_eq!(
        space.open_region(you, RegionSelector::Name("orders"), 5),
        Ok((orders, 10_000)),
        "it has its length"
    );
    assert_eq!(
        space.view(you, orders).unwrap().reaches(10_001),
        Err(SpaceError::BeyondRegion { bytes: 10_000, reach: 10_001 })
    );
    let own = space.create_region(ME).unwrap();
    assert_eq!(space.open_region(you, RegionSelector::Region(own), 1), Err(SpaceError::NotOwner));
    assert_eq!(space.open_region(ME, RegionSelector::Region(own), 0), Err(SpaceError::RegionLength));
    assert_eq!(space.open_region(ME, RegionSelector::Region(own), u64::MAX), Err(SpaceError::RegionLength));
    space.open_region(ME, RegionSelector::Region(own), 4096).unwrap();
    space.put(you, own, &[Extent::page(PageIndex(0))], &[page(1)], &mut Vec::new()).unwrap();
    let mut released = Vec::new();
    space.member_gone(ME);
    space.bury(u64::MAX, &mut released);
    assert_eq!(released, []);
    assert_eq!(space.open_region(ME, RegionSelector::Name("orders"), 0), Err(SpaceError::MemberGone));
    // The member that adopts it is its only user again.
    space.adopt_region(you, own).unwrap();
    space.member_gone(you);
    space.bury(u64::MAX, &mut released);
    assert_eq!(released, [FrameIndex(1)]);
    space.check();
    space.close();
    space.bury(u64::MAX, &mut released);
    space.check();
}

#[test]
fn an_update_is_remembered_as_long_as_it_may_be_asked_for_again() {
    // One after the other; and as clients number them, a slot and how often it was used. The third way puts
    // many of them in one place of the filter.
    let numberings: [fn(u64) -> u64; 3] =
        [|n| n, |n| (n % 7) | ((n / 7) << 32), |n| ((n % 2) << 10) | ((n / 2) << 40)];
    let mut space = LeaseSpace::new(1 << 20);
    for (member, number) in (2..).map(MemberId).zip(numberings) {
        space.member_joined(member, ConnectionNumber::FIRST);
        for n in 0..REMEMBERED as u64 + 1 {
            assert_eq!(space.answered(member, number(n)), None);
            space.remember(member, number(n), n * 2);
        }
        assert_eq!(space.answered(member, number(0)), None);
        assert!((1..=REMEMBERED as u64).all(|n| space.answered(member, number(n)) == Some(n * 2)));
        space.check();
    }
    assert_eq!(space.answered(ME, 5), None);
}

/// Thousands of empty regions of a lease of one byte cost nothing but the server.
#[test]
fn regions_beyond_a_few_are_paid_for() {
    let member = MemberId(1);
    let mut space = LeaseSpace::new(1);
    space.member_joined(member, ConnectionNumber::FIRST);
    let regions: Vec<RegionId> = (0..FREE_REGIONS).map(|_| space.create_region(member).unwrap()).collect();
    assert_eq!(space.create_region(member), Err(SpaceError::Full { free: 1 }));
    assert_eq!(space.clone_region(member, regions[0]), Err(SpaceError::Full { free: 1 }));
    space.set_limit(REGION_BYTES).unwrap();
    let last = space.clone_region(member, regions[0]).unwrap();
    assert_eq!(space.usage().used_bytes, REGION_BYTES);
    assert_eq!(space.create_region(member), Err(SpaceError::Full { free: 0 }));
    space.free_region(member, last).unwrap();
    assert!(!space.bury(u64::MAX, &mut Vec::new()));
    space.check();
    assert_eq!(space.usage().used_bytes, 0);
}
