//! Waits for one layer of a transfer.

use super::*;

/// A layer-by-layer transfer of two layers, and the job.
fn layer_by_layer() -> (Completion<()>, CopyJob, [Endpoint; 2]) {
    let engine = Engine::keeping();
    let manager = TransferManager::new([engine.clone() as _]);
    let ends = [endpoint_of(2), endpoint_of(2)];
    let transfer = transfer(&ends[0], &ends[1], 0).layer_by_layer();
    let completion = manager.submit(transfer, ()).unwrap();
    let job = engine.take().pop().unwrap();
    (completion, job, ends)
}

#[test]
fn a_wait_for_a_layer_sees_it_done_and_its_bytes() {
    model(|| {
        let (completion, job, _ends) = layer_by_layer();
        let layers = completion.layers().unwrap();
        let bytes = [Bytes::new(), Bytes::new()];
        let engines = {
            let bytes = bytes.clone();
            thread::spawn(move || {
                bytes[0].write();
                job.layers().unwrap().done(0..1);
                bytes[1].write();
                drop(bytes);
                succeed(job);
            })
        };
        layers.wait(0).unwrap();
        assert_eq!(bytes[0].read(), 1);
        layers.wait(1).unwrap();
        assert_eq!(bytes[1].read(), 1);
        assert!(completion.wait().result.is_ok());
        engines.join().unwrap();
    });
}

#[test]
fn a_wait_for_a_layer_of_a_failing_transfer_returns_the_failure() {
    model(|| {
        let (completion, job, _ends) = layer_by_layer();
        let layers = completion.layers().unwrap();
        let engines = thread::spawn(move || {
            job.layers().unwrap().done(0..1);
            fail(job);
        });
        let flag = Arc::<Flag>::default();
        let waker = Waker::from(Arc::clone(&flag));
        let mut future = pin!(layers.future(1));
        let end = loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(end) => break end,
                Poll::Pending => flag.wait(),
            }
        };
        assert_eq!(end, Err(LayerError::Failed { layer: 1 }));
        assert_eq!(layers.wait(0), Ok(()));
        drop(completion);
        engines.join().unwrap();
    });
}
