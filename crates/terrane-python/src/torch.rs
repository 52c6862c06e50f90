//! PyTorch's tensors. PyTorch has a current device for each thread, and a current stream for each thread and device.
//!
//! `Tensor.__dlpack__` refuses a tensor that is not on the current device. Older versions use the current stream of
//! the current device instead of the tensor's device.

use pyo3::prelude::*;

/// PyTorch's module, if the tensor is PyTorch's. This does not import PyTorch.
fn module_of<'py>(tensor: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let modules = tensor.py().import("sys")?.getattr("modules")?;
    let Ok(torch) = modules.get_item("torch") else { return Ok(None) };
    let Ok(class) = torch.getattr("Tensor") else { return Ok(None) };
    Ok(tensor.is_instance(&class).unwrap_or(false).then_some(torch))
}

/// The handle of PyTorch's current stream on the tensor's device; `None` for a tensor of another library.
pub(crate) fn current_stream(tensor: &Bound<'_, PyAny>) -> PyResult<Option<i64>> {
    let Some(torch) = module_of(tensor)? else { return Ok(None) };
    let device = tensor.getattr("device")?;
    let stream = torch.getattr("cuda")?.call_method1("current_stream", (device,))?;
    stream.getattr("cuda_stream")?.extract().map(Some)
}

/// Runs code while the tensor's CUDA device is PyTorch's current device, if the tensor is PyTorch's.
pub(crate) fn on_device_of<R>(
    tensor: &Bound<'_, PyAny>,
    run: impl FnOnce() -> PyResult<R>,
) -> PyResult<R> {
    let Some(torch) = module_of(tensor)? else { return run() };
    let device = tensor.getattr("device")?;
    let guard = torch.getattr("cuda")?.call_method1("device", (device,))?;
    guard.call_method0("__enter__")?;
    let result = run();
    let none = tensor.py().None();
    guard.call_method1("__exit__", (&none, &none, &none))?;
    result
}
