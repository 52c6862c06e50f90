//! Threads and futures that poll a job while they wait for it.

use super::*;

/// A job that ends when a thread polls it.
struct EndsAtPoll(Mutex<Option<CopyJob>>);

impl EndsAtPoll {
    fn end(&self) {
        // The lock is released before the job ends.
        let job = self.0.lock().unwrap().take();
        if let Some(job) = job {
            succeed(job);
        }
    }
}

impl WaiterProgress for EndsAtPoll {
    fn poll(&self) {
        self.end();
    }
}

/// The engine's thread or a waiting thread ends the job. The engine invites waiting threads before
/// it passes the job to its thread, or from that thread.
fn run_with_invitation(engine: &Engine, late: bool) -> thread::JoinHandle<()> {
    let job = engine.take().pop().unwrap();
    let on_look = Arc::new(EndsAtPoll(Mutex::new(None)));
    let hand_over = {
        let on_look = Arc::clone(&on_look);
        move || {
            job.invite_waiters(on_look.clone());
            *on_look.0.lock().unwrap() = Some(job);
        }
    };
    if late {
        thread::spawn(move || {
            hand_over();
            on_look.end();
        })
    } else {
        hand_over();
        thread::spawn(move || on_look.end())
    }
}

#[test]
fn a_polling_thread_and_the_engine_end_a_job_once() {
    for late in [false, true] {
        model(move || {
            let drops = Arc::<AtomicUsize>::default();
            let engine = Engine::keeping();
            let manager = TransferManager::new([engine.clone() as _]);
            let (from, to) = (endpoint(), endpoint());
            let guard = CountsDrops(Arc::clone(&drops));
            let completion = manager.submit(transfer(&from, &to, 0), guard).unwrap();
            let engines = run_with_invitation(&engine, late);
            let Outcome { guard, result } = completion.wait();
            assert!(result.is_ok());
            assert_eq!(drops.load(Ordering::SeqCst), 0);
            drop(guard);
            assert_eq!(drops.load(Ordering::SeqCst), 1);
            engines.join().unwrap();
            assert_free(&to);
        });
    }
}

#[test]
fn a_future_that_polls_is_woken_or_ready() {
    model(|| {
        let engine = Engine::keeping();
        let manager = TransferManager::new([engine.clone() as _]);
        let (from, to) = (endpoint(), endpoint());
        let completion = manager.submit(transfer(&from, &to, 0), ()).unwrap();
        let engines = run_with_invitation(&engine, true);
        let flag = Arc::<Flag>::default();
        let waker = Waker::from(Arc::clone(&flag));
        let mut future = pin!(completion.into_future());
        loop {
            if let Poll::Ready(outcome) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                break assert!(outcome.result.is_ok());
            }
            flag.wait();
        }
        engines.join().unwrap();
    });
}
