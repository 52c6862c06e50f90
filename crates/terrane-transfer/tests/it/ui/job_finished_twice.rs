//! An engine can finish a job only once.

use terrane_transfer::CopyJob;

fn example(job: CopyJob) {
    job.finish(Ok(()));
    job.finish(Ok(()));
}

fn main() {}
