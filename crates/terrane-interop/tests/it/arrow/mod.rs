//! Arrow arrays, in and out.

mod device;
mod foreign;
mod fuzz;
mod hostile;
mod peers;
mod released;
mod schemas;
