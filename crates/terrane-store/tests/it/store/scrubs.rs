//! Scrubs beside a device that does not read.

use std::thread;

use terrane_storage::IoFailureReason;
use terrane_store::{StoreError, tools};
use terrane_testkit::needs::or_skipped;
use terrane_testkit::process::{forbid, in_child};

use super::harness::{keys, open, put_ok};

const BLOCK: usize = 8192;

#[test]
fn a_scrub_keeps_blocks_that_the_device_does_not_read() {
    const TEST: &str = "store::scrubs::a_scrub_keeps_blocks_that_the_device_does_not_read";
    in_child(TEST, || {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let store = open(path, 8192, 16);
        put_ok(&store, &keys(0..4), BLOCK);
        drop(store);
        let before = tools::list(path, "model").unwrap().blocks;
        let directories = [path.to_owned()];
        for error in [libc::EIO, libc::ENOMEM] {
            let reports = thread::scope(|scope| {
                let run = || {
                    // Without io_uring, each read of a slab file is a call of preadv.
                    forbid(&[libc::SYS_io_uring_setup], libc::EPERM)?;
                    forbid(&[libc::SYS_preadv], error)?;
                    let verified = tools::verify(&directories, "model", None).unwrap();
                    Ok([verified, tools::scrub(&directories, "model", None).unwrap()])
                };
                scope.spawn(run).join().unwrap()
            });
            let reports = reports.map_err(|error: std::io::Error| error.into());
            let Some(reports) = or_skipped(TEST, reports) else { return };
            for report in reports {
                assert_eq!((report.blocks, report.bytes.get()), (4, 4 * 8192));
                assert_eq!(report.damaged, []);
                assert_eq!(report.unreadable.len(), 4);
                for (unreadable, block) in report.unreadable.iter().zip(&before) {
                    assert_eq!(&unreadable.block, block);
                    let StoreError::ReadFailed(failure) = &*unreadable.error else {
                        panic!("{}", unreadable.error)
                    };
                    let is_right =
                        matches!(failure.reason, IoFailureReason::Os(os) if os.code == error);
                    assert!(is_right, "{failure}");
                }
            }
            assert_eq!(tools::list(path, "model").unwrap().blocks, before);
        }
        let report = tools::scrub(&directories, "model", None).unwrap();
        assert_eq!((report.blocks, report.damaged, report.unreadable.len()), (4, Vec::new(), 0));
    });
}
