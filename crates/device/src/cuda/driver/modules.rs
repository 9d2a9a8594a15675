//! Modules, their kernels, and launches.

use std::ffi::{CStr, c_void};

use super::{Driver, Function, Module, Stream};
use crate::error::Result;

impl Driver {
    /// Loads kernels into the thread's context. PTX must end with a zero.
    ///
    /// # Safety
    /// The image is a whole cubin, or PTX that ends with a zero.
    pub(in crate::cuda) unsafe fn load_module(&self, image: &[u8]) -> Result<Module> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the caller's promise.
        unsafe { self.cuModuleLoadData(&raw mut module, image.as_ptr().cast()) }.map(|()| Module(module))
    }

    /// # Safety
    /// The caller's own module, none of whose kernels runs or will be launched.
    pub(in crate::cuda) unsafe fn unload_module(&self, module: Module) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.cuModuleUnload(module.0) }
    }

    /// A kernel by its name.
    ///
    /// # Safety
    /// The module is loaded.
    pub(in crate::cuda) unsafe fn function(&self, module: Module, name: &CStr) -> Result<Function> {
        let mut function = std::ptr::null_mut();
        // SAFETY: the caller's promise; the name ends with a zero.
        unsafe { self.cuModuleGetFunction(&raw mut function, module.0, name.as_ptr()) }?;
        Ok(Function(function))
    }

    /// Queues a kernel that takes one argument.
    ///
    /// # Safety
    /// The kernel takes exactly a `T`; all memory that it names is there until the work is done.
    pub(in crate::cuda) unsafe fn launch<T>(
        &self,
        function: Function,
        (blocks, threads): (u32, u32),
        argument: &T,
        stream: Stream,
    ) -> Result<()> {
        let mut arguments = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        // SAFETY: the caller's promise; the argument is copied before the call returns.
        unsafe {
            self.cuLaunchKernel(
                function.0,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.0,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }
}
