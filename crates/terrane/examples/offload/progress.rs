//! Progress bars on standard error, if it is a terminal.

use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use terrane::core::ByteCount;
use terrane::storage::Progress;
use terrane::transfer::{Completion, Outcome};

/// The interval between updates of a bar.
const TICK: Duration = Duration::from_millis(50);

/// Shows how much memory is ready while `work` allocates it.
pub fn while_allocating<T: Send>(
    message: &'static str,
    progress: &Progress,
    work: impl FnOnce() -> T + Send,
) -> T {
    let bar = bar(message);
    let result = thread::scope(|scope| {
        let worker = scope.spawn(work);
        while !worker.is_finished() {
            let (touched, total) = (progress.touched(), progress.total());
            bar.set_length(total.get());
            bar.set_position(touched.get());
            // Pinned memory is populated first, then locked, and then ready.
            let is_locked = touched == total && progress.ready() < touched;
            bar.set_message(if is_locked { "memory is locked" } else { message });
            thread::sleep(TICK);
        }
        worker.join()
    });
    bar.finish_and_clear();
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Waits for a transfer and shows its progress. Also returns the time since `begin`.
pub fn wait<G>(
    message: String,
    bytes: ByteCount,
    mut completion: Completion<G>,
    begin: Instant,
) -> (Outcome<G>, Duration) {
    let bar = bar(message);
    bar.set_length(bytes.get());
    loop {
        match completion.wait_until(Instant::now() + TICK) {
            Ok(outcome) => {
                let took = begin.elapsed();
                bar.finish_and_clear();
                return (outcome, took);
            }
            Err(still_going) => {
                bar.set_position(still_going.copied().get());
                completion = still_going;
            }
        }
    }
}

fn bar(message: impl Into<std::borrow::Cow<'static, str>>) -> ProgressBar {
    let template = "{msg:32} {bar:30} {binary_bytes:>10} of {binary_total_bytes}";
    let style = ProgressStyle::with_template(template);
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style).with_message(message)
}
