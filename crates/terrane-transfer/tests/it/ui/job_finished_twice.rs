//! An engine says once how a job ended.

use terrane_transfer::CopyJob;

fn example(job: CopyJob) {
    job.finish(Ok(()));
    job.finish(Ok(()));
}

fn main() {}
