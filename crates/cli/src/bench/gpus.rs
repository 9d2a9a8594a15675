//! A run on GPUs: which they are, and what is refused.

use tensorwire::device::gpu::{self, Answers, Gpu};

use super::Chosen;
use super::device::BenchDevice;
use super::op::Op;
use super::order::TensorMemory;
use crate::exit::Failure;

/// Refuses what cannot be measured on a GPU.
pub(super) fn check(chosen: &Chosen) -> Result<(), Failure> {
    let device = chosen.device;
    let why = match chosen {
        _ if !device.is_gpu() => return Ok(()),
        Chosen { operation: Some(Op::SendRecv), .. } => "send-recv: messages of GPUs are not measured yet",
        Chosen { memory: TensorMemory::Shared, .. } => {
            "--memory: tensors of a GPU are in memory of the pool, or of torch"
        }
        _ if chosen.against.iter().any(|peer| peer.is_mpi()) => {
            "libraries of MPI: they are measured on the host alone"
        }
        _ => return Ok(()),
    };
    Err(Failure::usage(format!("--device {device} cannot be used with {why}")))
}

/// The GPUs that ranks take in turn; none on the host. Said once, and not by each rank, where there is none.
pub(super) fn found(device: BenchDevice) -> Result<Vec<Gpu>, Failure> {
    if !device.is_gpu() {
        return Ok(Vec::new());
    }
    let driver = gpu::driver().map_err(|error| Failure::from(tensorwire::Error::from(error)))?;
    Ok(device.gpus(&Answers::new(driver))?)
}

/// The memory of our tensors. Through torch, those of a GPU are torch's own.
pub(super) fn memory(chosen: &Chosen) -> TensorMemory {
    if chosen.device.is_gpu() { TensorMemory::Pool } else { chosen.memory }
}
