use super::*;
use crate::checksum;
use proptest::prelude::*;

fn encryption() -> impl Strategy<Value = Encryption> {
    prop_oneof![Just(Encryption::Auto), Just(Encryption::On), Just(Encryption::Off)]
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Ask),
        prop_oneof![Just(Security::Open), Just(Security::ProvedPlain), Just(Security::Sealed)]
            .prop_map(Verdict::Agreed),
        (0..Refusal::ALL.len()).prop_map(|i| Verdict::Refused(Refusal::ALL[i])),
    ]
}

prop_compose! {
    fn preface()(
        a in 0..5u8,
        b in 0..5u8,
        encryption in encryption(),
        has_key: bool,
        features: u32,
        nonce: u64,
        verdict in verdict(),
        local_peer: bool,
        tenant: bool,
    ) -> Preface {
        let has_tenant = tenant && has_key && verdict == Verdict::Ask;
        Preface {
            min_version: a.min(b),
            max_version: a.max(b),
            encryption,
            has_key,
            features,
            nonce,
            verdict,
            local_peer,
            has_tenant,
        }
    }
}

prop_compose! {
    fn policy()(
        encryption in encryption(), has_key: bool, features in 0..2u32, local_peer: bool,
    ) -> ServerPolicy {
        ServerPolicy { encryption, has_key, features, local_peer, refuse: None }
    }
}

proptest! {
    #[test]
    fn a_preface_comes_back_as_it_was(preface in preface()) {
        prop_assert_eq!(Preface::parse(&preface.encode()), Ok(preface));
    }

    #[test]
    fn a_preface_with_one_flipped_bit_is_refused(preface in preface(), bit in 0..PREFACE_BYTES * 8) {
        let mut bytes = preface.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Preface::parse(&bytes).is_err());
    }

    #[test]
    fn arbitrary_bytes_with_a_right_checksum_never_panic(mut bytes: [u8; PREFACE_BYTES]) {
        bytes[..8].copy_from_slice(&PREFACE_MAGIC);
        let crc = checksum::crc32c(&bytes[..28]);
        bytes[28..].copy_from_slice(&crc.to_le_bytes());
        if let Ok(preface) = Preface::parse(&bytes) {
            prop_assert!(preface.min_version <= preface.max_version);
        }
    }

    /// The outcome is never less secure than either side allows.
    #[test]
    fn an_agreement_honours_both_sides(client in preface(), server in policy(), nonce: u64) {
        let client = Preface { verdict: Verdict::Ask, ..client };
        let answer = agree(&client, &server, nonce);
        let accepted = accept(&client, &answer);
        if let Verdict::Agreed(security) = answer.verdict {
            if accepted == Err(AcceptError::PlainFromAfar) {
                // Without a key the server cannot know whether a relay forwards the connection, nor prove
                // that none does.
                prop_assert_eq!((security, client.local_peer), (Security::Open, false));
                return Ok(());
            }
            prop_assert_eq!(accepted, Ok((security, client.features & server.features)));
            let either_on = client.encryption == Encryption::On || server.encryption == Encryption::On;
            let either_off = client.encryption == Encryption::Off || server.encryption == Encryption::Off;
            prop_assert!(!either_on || security == Security::Sealed);
            prop_assert!(!either_off || security != Security::Sealed);
            if security == Security::Open {
                prop_assert!(server.local_peer && !server.has_key && !client.has_key);
            } else {
                prop_assert!(server.has_key && client.has_key);
            }
            if security == Security::ProvedPlain && !(server.local_peer && client.local_peer) {
                prop_assert_eq!((client.encryption, server.encryption), (Encryption::Off, Encryption::Off));
            }
        } else {
            prop_assert!(accepted.is_err());
        }
    }

    /// A client does not accept less than it offered, whatever the server (or an attacker on the way)
    /// answers.
    #[test]
    fn a_client_accepts_only_what_it_offered(asked in preface(), answer in preface()) {
        if let Ok((security, features)) = accept(&asked, &answer) {
            prop_assert!(asked.has_key || security == Security::Open);
            prop_assert!(!asked.has_key || security != Security::Open);
            prop_assert!(asked.encryption != Encryption::On || security == Security::Sealed);
            prop_assert!(
                security == Security::Sealed || asked.local_peer || asked.encryption == Encryption::Off
            );
            prop_assert_eq!(features & !asked.features, 0);
        }
    }

    #[test]
    fn credits_count_what_is_outstanding(
        max_requests in 0..20u32,
        max_bytes in 0..100_000u32,
        steps in prop::collection::vec((any::<bool>(), 0..20_000u64), 0..200),
    ) {
        let mut credits = Credits::new(max_requests, max_bytes);
        let mut outstanding: Vec<u64> = Vec::new();
        for (take, bytes) in steps {
            if take {
                let fits = outstanding.len() < max_requests as usize
                    && outstanding.iter().sum::<u64>() + bytes <= u64::from(max_bytes);
                prop_assert_eq!(credits.take(bytes), fits);
                if fits {
                    outstanding.push(bytes);
                }
            } else if let Some(bytes) = outstanding.pop() {
                credits.give_back(bytes);
            }
            credits.check();
            prop_assert_eq!(
                credits.outstanding(),
                (u32::try_from(outstanding.len()).unwrap(), outstanding.iter().sum())
            );
        }
    }
}

#[test]
fn the_outcomes_people_ask_about() {
    use Encryption::{Auto, Off, On};
    let outcome = |client: (Encryption, bool), server: (Encryption, bool), local_peer| {
        let asked = Preface::ask(client.0, client.1, 0, 1).to_local_peer(local_peer);
        let policy =
            ServerPolicy { encryption: server.0, has_key: server.1, features: 0, local_peer, refuse: None };
        agree(&asked, &policy, 2).verdict
    };
    let agreed = Verdict::Agreed;
    let refused = Verdict::Refused;
    assert_eq!(outcome((Auto, false), (Auto, false), true), agreed(Security::Open));
    assert_eq!(outcome((Auto, false), (Auto, false), false), refused(Refusal::KeyNeeded));
    assert_eq!(outcome((Auto, false), (Auto, true), true), refused(Refusal::KeyNeeded));
    assert_eq!(outcome((Auto, true), (Auto, false), true), refused(Refusal::NoKeyHere));
    assert_eq!(outcome((Auto, true), (Auto, true), true), agreed(Security::ProvedPlain));
    assert_eq!(outcome((Auto, true), (Auto, true), false), agreed(Security::Sealed));
    assert_eq!(outcome((On, true), (Auto, true), true), agreed(Security::Sealed));
    assert_eq!(outcome((Off, true), (Auto, true), false), refused(Refusal::Encryption));
    assert_eq!(outcome((Off, true), (Off, true), false), agreed(Security::ProvedPlain));
    assert_eq!(outcome((On, true), (Off, true), true), refused(Refusal::Encryption));
    assert_eq!(outcome((On, false), (Auto, false), true), refused(Refusal::EncryptionNeedsKey));
}

/// A relay on the server's machine: the server sees a peer on its own machine, the client does not.
#[test]
fn a_connection_that_is_passed_on_is_not_taken_for_one_within_a_machine() {
    let policy = |has_key| ServerPolicy {
        encryption: Encryption::Auto,
        has_key,
        features: 0,
        local_peer: true,
        refuse: None,
    };
    let far = |has_key| Preface::ask(Encryption::Auto, has_key, 0, 1);
    assert_eq!(agree(&far(true), &policy(true), 2).verdict, Verdict::Agreed(Security::Sealed));
    let plain = agree(&far(true).to_local_peer(true), &policy(true), 2);
    assert_eq!(plain.verdict, Verdict::Agreed(Security::ProvedPlain));
    assert_eq!(
        accept(&far(true), &plain),
        Err(AcceptError::PlainFromAfar),
        "altered on the way, or by a server that does not ask"
    );
    assert_eq!(accept(&far(false), &agree(&far(false), &policy(false), 2)), Err(AcceptError::PlainFromAfar));
}
