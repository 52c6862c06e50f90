//! Layouts that travel between agents.

mod support;

use std::time::Instant;

use terrane_layout::LayoutKind;

use support::*;

#[test]
fn measured() {
    let (alpha, beta) = (agent(), agent());
    for kind in LayoutKind::ALL {
        let layout = layout(&alpha, kind);
        let start = Instant::now();
        let bytes = alpha.export(&layout).unwrap();
        let exported = start.elapsed();
        let start = Instant::now();
        let remote = beta.import(&bytes).unwrap();
        let first = start.elapsed();
        let start = Instant::now();
        let again = beta.import(&bytes).unwrap();
        let second = start.elapsed();
        println!("{} bytes, export {exported:?}, import {first:?}, again {second:?}", bytes.len());
        assert_eq!(again.endpoint().id(), remote.endpoint().id());
        for n in 0..3 {
            let start = Instant::now();
            let peer = remote.peer();
            beta.forget(peer).unwrap();
            let forgot = start.elapsed();
            let start = Instant::now();
            let r2 = beta.import(&bytes).unwrap();
            println!("{n} forget {forgot:?} import {:?}", start.elapsed());
            beta.forget(r2.peer()).unwrap();
            let r3 = beta.import(&bytes);
            println!("{:?}", r3.as_ref().map(|r| r.peer()));
            std::mem::forget(r3);
            break;
        }
    }
}
