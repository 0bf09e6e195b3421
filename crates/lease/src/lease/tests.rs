use super::*;
use proptest::prelude::*;
use rampool_wire::frame::RegionId;

fn limits() -> Limits {
    Limits { memory_bytes: 1000, grace_ms: 50, max_leases: 5, max_members: 3 }
}

fn open(bytes: u64) -> OpenLease {
    OpenLease { bytes, pid: 1, name: "n".into(), host: "h".into() }
}

fn attach(lease: LeaseId, token: LeaseToken, member: MemberId) -> AttachLease {
    AttachLease { lease, token, member, pid: 2, name: "n".into(), host: "h".into() }
}

const TOKEN: LeaseToken = LeaseToken([7; 16]);

#[test]
fn what_closing_leases_are_about_to_give_back_is_told_apart_from_what_is_not_there() {
    let mut directory =
        Directory::new(Limits { memory_bytes: 10 * 4096, grace_ms: 50, max_leases: 2, max_members: 3 });
    let (big, member) = directory.open(None, &open(8 * 4096), TOKEN).unwrap();
    let (small, _) = directory.open(None, &open(4096), TOKEN).unwrap();
    assert_eq!(directory.open(None, &open(4096), TOKEN), Err(OpenError::TooMany));
    assert!(directory.leave(big, member).unwrap().lease_closes);
    let waits = OpenError::Closing { free: 4096, closing: 8 * 4096 };
    assert_eq!(directory.open(None, &open(9 * 4096), TOKEN), Err(waits));
    assert_eq!(
        directory.open(None, &open(4096), TOKEN),
        Err(waits),
        "a place among the leases is about to be free as well"
    );
    assert_eq!(directory.open(None, &open(9 * 4096 + 1), TOKEN), Err(OpenError::TooLarge { free: 9 * 4096 }));
    let mut space = LeaseSpace::new(4096);
    let mut resize =
        |directory: &mut Directory, pages: u64| resize_lease(directory, &mut space, small, pages * 4096);
    assert_eq!(resize(&mut directory, 3), Err(ResizeError::Closing { free: 4096, closing: 8 * 4096 }));
    assert_eq!(resize(&mut directory, 11), Err(ResizeError::TooLarge { free: 9 * 4096 }));
    directory.closed(big);
    assert_eq!(resize(&mut directory, 3), Ok(()));
    assert_eq!(directory.open(None, &open(7 * 4096), TOKEN).map(drop), Ok(()));
    directory.check();
}

#[test]
fn a_lease_that_does_not_fit_is_told_what_is_free() {
    let mut directory = Directory::new(limits());
    directory.open(None, &open(700), TOKEN).unwrap();
    assert_eq!(directory.open(None, &open(301), TOKEN), Err(OpenError::TooLarge { free: 300 }));
    assert_eq!(directory.open(None, &open(u64::MAX), TOKEN), Err(OpenError::TooLarge { free: 300 }));
    assert_eq!(directory.open(None, &open(0), TOKEN), Err(OpenError::Empty));
    directory.open(None, &open(300), TOKEN).unwrap();
    directory.check();
}

#[test]
fn a_lost_member_that_comes_back_in_time_keeps_its_place() {
    let mut directory = Directory::new(limits());
    let (lease, member) = directory.open(None, &open(10), TOKEN).unwrap();
    let first = ConnectionNumber::FIRST;
    directory.disconnected(Tick(100), lease, member, first);
    assert_eq!(directory.next_expiry(), Some(Tick(150)));
    assert_eq!(directory.expire(Tick(149)), []);
    let (_, second, _) = directory.attach(None, &attach(lease, TOKEN, member)).unwrap();
    assert_eq!(directory.expire(Tick(1000)), []);
    // It may come back before its old connection is seen to be broken.
    let (_, third, _) = directory.attach(None, &attach(lease, TOKEN, member)).unwrap();
    assert!(directory.is_current(lease, member, third) && !directory.is_current(lease, member, second));
    directory.disconnected(Tick(500), lease, member, second);
    assert_eq!(directory.next_expiry(), None, "that one does not count any more");
    directory.disconnected(Tick(1000), lease, member, third);
    assert_eq!(directory.expire(Tick(1050)), [Departed { lease, member, lease_closes: true }]);
    assert_eq!(
        directory.attach(None, &attach(lease, TOKEN, member)),
        Err(AttachError::NoSuchLease),
        "it is closing"
    );
    assert_eq!(directory.free_bytes(), 990, "its memory is not free yet");
    directory.closed(lease);
    assert_eq!(directory.free_bytes(), 1000);
    directory.check();
}

#[test]
fn a_lease_lives_as_long_as_its_last_member() {
    let mut directory = Directory::new(limits());
    let (lease, first) = directory.open(None, &open(10), TOKEN).unwrap();
    let (second, ..) = directory.attach(None, &attach(lease, TOKEN, MemberId(0))).unwrap();
    assert_ne!(first, second);
    assert_eq!(directory.leave(lease, first), Some(Departed { lease, member: first, lease_closes: false }));
    assert_eq!(directory.leave(lease, first), None);
    assert_eq!(directory.attach(None, &attach(lease, TOKEN, first)), Err(AttachError::MemberGone));
    assert_eq!(directory.leave(lease, second), Some(Departed { lease, member: second, lease_closes: true }));
}

#[test]
fn a_token_is_needed_to_join() {
    let mut directory = Directory::new(limits());
    let (lease, member) = directory.open(None, &open(10), TOKEN).unwrap();
    assert_eq!(
        directory.attach(None, &attach(lease, LeaseToken([8; 16]), member)),
        Err(AttachError::NoSuchLease)
    );
    assert_eq!(directory.attach(None, &attach(LeaseId(99), TOKEN, member)), Err(AttachError::NoSuchLease));
}

#[test]
fn a_lease_grows_into_what_is_free_and_shrinks_to_what_is_used() {
    let mut directory = Directory::new(Limits { memory_bytes: 100 * 4096, ..limits() });
    let (lease, member) = directory.open(None, &open(4096), TOKEN).unwrap();
    directory.open(None, &open(50 * 4096), TOKEN).unwrap();
    let mut space = LeaseSpace::new(4096);
    let mut resize =
        |directory: &mut Directory, pages: u64| resize_lease(directory, &mut space, lease, pages * 4096);
    assert_eq!(resize(&mut directory, 51), Err(ResizeError::TooLarge { free: 49 * 4096 }));
    assert_eq!(resize(&mut directory, 50), Ok(()));
    assert_eq!(directory.free_bytes(), 0);
    assert_eq!(resize(&mut directory, 0), Err(ResizeError::Empty));
    space.member_joined(member, ConnectionNumber::FIRST);
    let region: RegionId = space.create_region(member).unwrap();
    let page = |frame| {
        Some(super::super::StoredPage {
            frame: super::super::FrameIndex(frame),
            crc: 0,
            len: 4096,
            charge: 4096,
        })
    };
    let extent = [rampool_wire::units::Extent::new(rampool_wire::units::PageIndex(0), 3)];
    space.put(member, region, &extent, &[page(1), page(2), page(3)], &mut Vec::new()).unwrap();
    let in_use = resize_lease(&mut directory, &mut space, lease, 2 * 4096);
    assert_eq!(in_use, Err(ResizeError::InUse { used: 3 * 4096 }));
    assert_eq!(resize_lease(&mut directory, &mut space, lease, 3 * 4096), Ok(()));
    assert_eq!(directory.free_bytes(), 47 * 4096);
    directory.check();
}

#[derive(Clone, Debug)]
enum Step {
    Open(u64),
    Join(usize),
    Return(usize),
    Disconnect(usize),
    Leave(usize),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0..600u64).prop_map(Step::Open),
        (0..20usize).prop_map(Step::Join),
        (0..20usize).prop_map(Step::Return),
        (0..20usize).prop_map(Step::Disconnect),
        (0..20usize).prop_map(Step::Leave),
        (0..60u64).prop_map(Step::Wait),
    ]
}

struct Known {
    lease: LeaseId,
    member: MemberId,
    connection: ConnectionNumber,
    lost_at: Option<u64>,
}

proptest! {
    /// The directory against a plain list of members.
    #[test]
    fn members_come_and_go_as_a_plain_list_says(steps in prop::collection::vec(step(), 0..120)) {
        let mut directory = Directory::new(limits());
        let (mut known, mut now) = (Vec::<Known>::new(), 0);
        let mut sizes: BTreeMap<LeaseId, u64> = BTreeMap::new();
        for step in steps {
            let count = known.len();
            let mut departed = Vec::new();
            match step {
                Step::Open(bytes) => {
                    let lent: u64 = sizes.values().sum();
                    let result = directory.open(None, &open(bytes), TOKEN);
                    prop_assert_eq!(result.is_ok(), bytes > 0 && bytes <= 1000 - lent && sizes.len() < 5);
                    if let Ok((lease, member)) = result {
                        prop_assert!(sizes.insert(lease, bytes).is_none());
                        let connection = ConnectionNumber::FIRST;
                        known.push(Known { lease, member, connection, lost_at: None });
                    }
                }
                Step::Join(i) if count > 0 => {
                    let lease = known[i % count].lease;
                    let result = directory.attach(None, &attach(lease, TOKEN, MemberId(0)));
                    prop_assert_eq!(result.is_ok(), known.iter().filter(|k| k.lease == lease).count() < 3);
                    if let Ok((member, connection, bytes)) = result {
                        prop_assert_eq!(bytes, sizes[&lease]);
                        prop_assert!(known.iter().all(|k| k.member != member));
                        known.push(Known { lease, member, connection, lost_at: None });
                    }
                }
                Step::Return(i) if count > 0 => {
                    let k = &mut known[i % count];
                    let (_, new, _) = directory.attach(None, &attach(k.lease, TOKEN, k.member)).unwrap();
                    prop_assert!(new > k.connection);
                    // The state of the one before does not matter any more.
                    directory.disconnected(Tick(now), k.lease, k.member, k.connection);
                    (k.connection, k.lost_at) = (new, None);
                }
                // The second time it says nothing new.
                Step::Disconnect(i) if count > 0 => {
                    let k = &mut known[i % count];
                    directory.disconnected(Tick(now), k.lease, k.member, k.connection);
                    k.lost_at.get_or_insert(now);
                }
                Step::Leave(i) if count > 0 => {
                    let k = &known[i % count];
                    departed.extend(directory.leave(k.lease, k.member));
                    prop_assert_eq!(departed.len(), 1);
                }
                Step::Wait(ms) => {
                    now += ms;
                    departed = directory.expire(Tick(now));
                    let over = |k: &Known| k.lost_at.is_some_and(|lost| now - lost >= 50);
                    prop_assert_eq!(departed.len(), known.iter().filter(|k| over(k)).count());
                }
                _ => {}
            }
            for gone in departed {
                known.retain(|k| k.member != gone.member);
                let last = known.iter().all(|k| k.lease != gone.lease);
                prop_assert_eq!(gone.lease_closes, last);
                if last {
                    directory.closed(gone.lease);
                    sizes.remove(&gone.lease);
                }
            }
            directory.check();
            prop_assert_eq!(directory.lent_bytes(), sizes.values().sum::<u64>());
            let expiry = known.iter().filter_map(|k| k.lost_at).map(|lost| Tick(lost + 50)).min();
            prop_assert_eq!(directory.next_expiry(), expiry);
        }
    }
}

fn alice() -> Payer {
    Some("alice".parse().unwrap())
}

fn bytes_each(most: u64) -> crate::Rules {
    let default = crate::Quota { memory_bytes: Some(most), ..crate::Quota::default() };
    crate::Rules { default, ..crate::Rules::default() }
}

#[test]
fn a_tenants_leases_stay_within_its_quota() {
    let mut directory = Directory::new(limits());
    directory.accounts_mut().set_rules(bytes_each(500));
    let (first, member) = directory.open(alice(), &open(300), TOKEN).unwrap();
    let over = OverQuota { what: "bytes", has: 300, quota: 500 };
    assert_eq!(directory.open(alice(), &open(201), TOKEN), Err(OpenError::OverQuota(over)));
    let (second, _) = directory.open(alice(), &open(200), TOKEN).unwrap();
    let mut space = LeaseSpace::new(200);
    let over = OverQuota { has: 500, ..over };
    assert_eq!(resize_lease(&mut directory, &mut space, second, 201), Err(ResizeError::OverQuota(over)));
    resize_lease(&mut directory, &mut space, second, 150).unwrap();
    // Others have theirs, and the master what is left.
    directory.open(Some("bob".parse().unwrap()), &open(500), TOKEN).unwrap();
    directory.check();
    // What is about to be given back is waited for.
    assert!(directory.leave(first, member).unwrap().lease_closes);
    assert!(matches!(directory.open(alice(), &open(350), TOKEN), Err(OpenError::Closing { .. })));
    assert!(matches!(directory.open(alice(), &open(351), TOKEN), Err(OpenError::OverQuota(_))));
    directory.closed(first);
    directory.open(alice(), &open(350), TOKEN).unwrap();
    // A smaller quota takes nothing away, and what is there may shrink.
    directory.accounts_mut().set_rules(bytes_each(1));
    directory.check();
    resize_lease(&mut directory, &mut space, second, 100).unwrap();
    assert!(resize_lease(&mut directory, &mut space, second, 101).is_err());
    directory.check();
}

#[test]
fn a_tenant_has_a_quarter_of_the_places_and_the_master_all() {
    let mut directory = Directory::new(Limits { max_leases: 8, ..limits() });
    let (first, member) = directory.open(alice(), &open(1), TOKEN).unwrap();
    directory.open(alice(), &open(1), TOKEN).unwrap();
    let over = OverQuota { what: "leases", has: 2, quota: 2 };
    assert_eq!(directory.open(alice(), &open(1), TOKEN), Err(OpenError::TooManyOfTenant(over)));
    // A place that is about to be free is waited for.
    directory.leave(first, member).unwrap();
    assert!(matches!(directory.open(alice(), &open(1), TOKEN), Err(OpenError::Closing { closing: 1, .. })));
    directory.closed(first);
    directory.open(alice(), &open(1), TOKEN).unwrap();
    (0..6).for_each(|_| _ = directory.open(None, &open(1), TOKEN).unwrap());
    directory.check();
    assert_eq!(directory.open(None, &open(1), TOKEN), Err(OpenError::TooMany));
}

#[test]
fn who_may_come_back_counts_as_a_connection() {
    let mut directory = Directory::new(Limits { max_leases: 40, ..limits() });
    let quota = crate::Quota { connections: Some(2), ..crate::Quota::default() };
    directory.accounts_mut().set_rules(crate::Rules { default: quota, ..crate::Rules::default() });
    directory.accounts_mut().connect(alice());
    let (lease, member) = directory.open(alice(), &open(1), TOKEN).unwrap();
    let (other, its) = directory.open(alice(), &open(1), TOKEN).unwrap();
    directory.disconnected(Tick(1), lease, member, ConnectionNumber::FIRST);
    directory.disconnected(Tick(2), other, its, ConnectionNumber::FIRST);
    let over = OverQuota { what: "connections", has: 3, quota: 2 };
    assert_eq!(directory.open(alice(), &open(1), TOKEN), Err(OpenError::TooManyOfTenant(over)));
    let joins = directory.attach(alice(), &attach(lease, TOKEN, MemberId(0)));
    assert_eq!(joins, Err(AttachError::TooManyOfTenant(over)));
    directory.check();
    // It comes back, and then it is a connection itself; or it is given up.
    directory.attach(alice(), &attach(lease, TOKEN, member)).unwrap();
    directory.open(alice(), &open(1), TOKEN).unwrap();
    assert_eq!(directory.accounts().of(alice()).lost, 1);
    assert_eq!(directory.expire(Tick(60)).len(), 1);
    assert_eq!(directory.accounts().of(alice()).lost, 0);
    directory.check();
}

#[test]
fn a_ticket_is_of_no_use_to_another_tenant() {
    let mut directory = Directory::new(limits());
    let (lease, member) = directory.open(alice(), &open(10), TOKEN).unwrap();
    for other in [None, Some("bob".parse().unwrap())] {
        for member in [MemberId(0), member] {
            let attached = directory.attach(other, &attach(lease, TOKEN, member));
            assert_eq!(attached, Err(AttachError::NoSuchLease));
        }
    }
    directory.attach(alice(), &attach(lease, TOKEN, member)).unwrap();
}

#[test]
fn accounts_return_to_zero() {
    let mut directory = Directory::new(limits());
    let (lease, member) = directory.open(alice(), &open(10), TOKEN).unwrap();
    directory.accounts_mut().connect(alice());
    directory.accounts_mut().charge(alice(), 2, 1).unwrap();
    let account = crate::Account {
        lent_bytes: 10,
        leases: 1,
        connections: 1,
        regions: 2,
        queues: 1,
        ..Default::default()
    };
    assert_eq!(directory.accounts().of(alice()), account);
    directory.leave(lease, member).unwrap();
    directory.accounts_mut().settle(
        alice(),
        crate::Charges { regions: 2, queues: 1, table_bytes: 0 },
        crate::Charges::default(),
    );
    directory.accounts_mut().disconnect(alice());
    assert_eq!(directory.accounts().of(alice()).lent_bytes, 10, "not before it is free");
    directory.closed(lease);
    assert_eq!(directory.accounts().all().count(), 0);
    directory.check();
}
