//! Notifications of transfers.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_nixl::{Agent, NixlEngineOptions, NixlError, Notification, Status};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_transfer::{Endpoint, Transfer, TransferError, TransferManager};

use super::support::*;

/// Waits for this many messages, up to a time limit.
fn expect(agent: &Agent, count: usize) -> Vec<Notification> {
    let patience = Instant::now() + Duration::from_secs(120);
    let mut found = Vec::new();
    while found.len() < count {
        assert!(Instant::now() < patience, "{} of {count} have arrived", found.len());
        found.extend(agent.wait_for_notifications(patience).unwrap());
    }
    found
}

#[test]
fn notifications_arrive_unchanged_after_the_bytes() {
    let pair = Pair::new();
    let local = pair.local(config(8), CONTIGUOUS);
    // The peer's endpoint: the local transfer may end after the notification of the peer.
    let theirs = registered(&HeapAllocator::system(), &pair.there, config(8), CONTIGUOUS);
    let theirs = Endpoint::new(theirs).unwrap();
    let remote = pair.here.import(&pair.there.export(theirs.layout()).unwrap()).unwrap();
    let remote = remote.endpoint().clone();
    let small = NixlEngineOptions {
        request_bytes: ByteCount::new(1000),
        requests: NonZeroUsize::new(3).unwrap(),
        ..NixlEngineOptions::default()
    };
    let messages: [&[u8]; 5] =
        [b"blocks 3 and 4", b"", b"\0zero\0", &[0xFF, 0xFE, 0x80, b'|', b'\n'], &vec![7; 20_000]];
    for options in [NixlEngineOptions::default(), small] {
        let manager = TransferManager::new([pair.engine(options)]);
        for (number, message) in (1..).zip(messages) {
            let image = Image::scribble(&local, &PeersInProcess, number);
            let transfer = Transfer::new(&local, &remote).blocks(&[3, 4, 0], &[3, 4, 1]);
            let completion = manager.submit(transfer.notify(message), ()).unwrap();
            let [notification] = &expect(&pair.there, 1)[..] else {
                panic!("not one notification")
            };
            // The message has arrived, so the bytes have too.
            let found = Image::of(&theirs, &InProcess);
            let mut expected = found.clone();
            expected.transfer(&image, &[3, 4, 0], &[3, 4, 1], 0..2);
            found.assert_equals(&expected, "when the peer was notified");
            assert_eq!(
                (&notification.from, &notification.message[..]),
                (pair.here.name(), message)
            );
            end_of(completion).result.unwrap();
        }
    }
    assert_eq!(pair.there.notifications().unwrap(), []);
}

#[test]
fn reads_and_empty_transfers_send_notifications_too() {
    let pair = Pair::new();
    let (local, remote) = (pair.local(config(4), CONTIGUOUS), pair.remote(config(4), CONTIGUOUS));
    let manager = pair.manager();
    let read = Transfer::new(&remote, &local).blocks(&[1], &[2]).notify(*b"yours again");
    end_of(manager.submit(read, ()).unwrap()).result.unwrap();
    let nothing = Transfer::new(&local, &remote).notify(*b"nothing");
    end_of(manager.submit(nothing, ()).unwrap()).result.unwrap();
    let mut messages: Vec<_> =
        expect(&pair.there, 2).into_iter().map(|notification| notification.message).collect();
    messages.sort();
    assert_eq!(messages, [b"nothing".to_vec(), b"yours again".to_vec()]);
}

#[test]
fn no_notification_is_lost() {
    const MANY: u32 = 100;
    let pair = Pair::new();
    let (local, remote) = (pair.local(config(4), CONTIGUOUS), pair.remote(config(4), CONTIGUOUS));
    let manager = pair.manager();
    let mut last = None;
    for number in 0..MANY {
        let mut transfer = Transfer::new(&local, &remote).blocks(&[0], &[1]);
        if let Some(ticket) = &last {
            transfer = transfer.after(ticket);
        }
        let completion = manager.submit(transfer.notify(number.to_le_bytes()), ()).unwrap();
        last = Some(completion.ticket());
    }
    let messages: Vec<_> =
        expect(&pair.there, 100).into_iter().map(|notification| notification.message).collect();
    let sent: Vec<_> = (0..MANY).map(|number| number.to_le_bytes().to_vec()).collect();
    assert_eq!(messages, sent);
}

#[test]
fn messages_without_transfers_arrive_in_order() {
    let pair = Pair::new();
    let remote = pair.remote(config(1), CONTIGUOUS);
    let terrane_core::StorageKind::Remote(peer) = remote.kind() else { panic!("{remote:?}") };
    pair.here.notify(peer, b"one").unwrap();
    pair.here.notify(peer, b"two").unwrap();
    let found = expect(&pair.there, 2);
    assert!(found.iter().all(|notification| notification.from == *pair.here.name()), "{found:?}");
    assert_eq!([&found[0].message, &found[1].message], [b"one", b"two"]);
}

#[test]
fn a_failed_transfer_sends_no_notification() {
    let pair = Pair::new();
    let (local, remote) = (pair.local(config(4), CONTIGUOUS), pair.remote(config(4), CONTIGUOUS));
    let manager = pair.manager();
    let late = Transfer::new(&local, &remote).blocks(&[0], &[0]).deadline(Instant::now());
    match end_of(manager.submit(late.notify(*b"late"), ()).unwrap()).result {
        Err(TransferError::DeadlineExceeded { .. }) => {}
        other => panic!("{other:?}"),
    }
    let well = Transfer::new(&local, &remote).blocks(&[0], &[0]).notify(*b"well");
    end_of(manager.submit(well, ()).unwrap()).result.unwrap();
    assert_eq!(expect(&pair.there, 1)[0].message, b"well");
}

#[test]
fn a_notification_needs_a_peer() {
    let pair = Pair::new();
    let [a, b] = [(); 2].map(|()| pair.local(config(1), CONTIGUOUS));
    let transfer = Transfer::new(&a, &b).blocks(&[0], &[0]).notify(*b"?");
    let cause = pair.manager().submit(transfer, ()).unwrap_err().cause;
    assert!(matches!(cause, TransferError::NotificationWithoutPeer { .. }), "{cause}");
}

#[test]
fn an_agent_without_notifications_returns_an_error() {
    let storage = crate::support::agent([crate::support::posix()]);
    let patience = Instant::now() + Duration::from_secs(120);
    for error in [storage.notifications(), storage.wait_for_notifications(patience)] {
        let error = error.unwrap_err();
        let NixlError::Call { operation, status } = &error else { panic!("{error:?}") };
        assert_eq!((*operation, *status), ("taking notifications", Status::Backend), "{error}");
    }
    assert!(Instant::now() < patience, "it waited for a notification that cannot arrive");
}
