"""Echo of tensors through torch's RPC, which is TensorPipe: rank 0 measures, and prints one JSON line for each size."""

import json
import sys
import time

import torch
import torch.distributed.rpc as rpc

ROUNDS = 3


def echo(tensor):
    return tensor


def main():
    rank, port, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    device = torch.device("cuda:0" if sys.argv[5] == "cuda" else sys.argv[5])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=300)
    if device.type == "cuda":
        options.set_device_map(f"end{1 - rank}", {device: device})
    rpc.init_rpc(f"end{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for size in map(int, sys.argv[4].split(",")):
            measure(size, seconds, device)
    rpc.shutdown()


def measure(size, seconds, device):
    tensor, times = torch.ones(size, dtype=torch.uint8, device=device), []
    rpc.rpc_sync("end1", echo, (tensor,))
    end = time.perf_counter() + seconds
    while len(times) < ROUNDS or time.perf_counter() < end and len(times) < 10_000:
        begin = time.perf_counter()
        back = rpc.rpc_sync("end1", echo, (tensor,))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) * 1e6)
        del back
    times.sort()
    at = lambda share: times[round(share * (len(times) - 1))]
    row = {"bytes": size, "rounds": len(times), "median_us": at(0.5), "p99_us": at(0.99), "torch": torch.__version__}
    print(json.dumps(row), flush=True)


main()
