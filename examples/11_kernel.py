"""A kernel of your own reads the memory of all ranks: it gets the array of their addresses.

    tensorwire run -n 2 -- python examples/11_kernel.py

torch compiles it with NVRTC when it is first used. Without a GPU there is nothing to show.
"""

import sys

try:
    import torch
except ImportError:
    torch = None
if torch is None or not torch.cuda.is_available():
    print("no GPU, or no torch for it: nothing to show")
    sys.exit(0)
if not hasattr(torch.cuda, "_compile_kernel"):
    print(f"torch {torch.__version__} does not compile kernels: nothing to show")
    sys.exit(0)

import tensorwire
from tensorwire import symmetric

KERNEL = """
extern "C" __global__ void largest_of_all(const float *const *ranks, float *out, int world, int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    float most = ranks[0][at];
    for (int rank = 1; rank < world; rank++) most = fmaxf(most, ranks[rank][at]);
    out[at] = most;
}
"""
COUNT, THREADS = 1 << 20, 256

group = tensorwire.init()
device = torch.device("cuda", group.rank % torch.cuda.device_count())
torch.cuda.set_device(device)
largest_of_all = torch.cuda._compile_kernel(KERNEL, "largest_of_all")

mine = symmetric.empty(COUNT, torch.float32, device)
handle = symmetric.rendezvous(mine, group)
out = torch.empty_like(mine)

generator = torch.Generator(device).manual_seed(group.rank)
mine.normal_(generator=generator)
# Streams meet, not threads: what all ranks have queued so far is done when the kernel begins.
handle.barrier()
largest_of_all(((COUNT + THREADS - 1) // THREADS, 1, 1), (THREADS, 1, 1), [handle.buffer_addresses, out, group.world, COUNT])
# And nobody writes to its memory again before all have read it.
handle.barrier()

symmetric.all_reduce(mine, "max", group)
assert torch.equal(out, mine)
print(f"rank {group.rank} of {group.world}: the kernel has found what all_reduce finds")
handle.barrier()
torch.cuda.synchronize()
handle.close()
