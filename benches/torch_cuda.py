"""What users of torch get on GPUs, beside Gloo, as JSON lines. Each process is a rank:

    tensorwire run -n 4 --no-prefix -- python benches/torch_cuda.py groups --backend tensorwire
    tensorwire run -n 2 --no-prefix -- python benches/torch_cuda.py train --backend gloo

groups: all_reduce where all ranks have their tensors on the CPU, all on the GPU, and half of them on each.
overlap: rank 0 has its tensor on the CPU, so all tensors go through memory of the host; what the last rank saw go on at once.
parts: where the time of a small all_reduce goes: what the call holds the host for, what the GPU does behind it, and what the parts of
it cost alone. With --command, the record of the last calls, too: when all ranks had met, and when the steps were queued.
train: DDP and FSDP2 train a model on the GPU; the losses, the time of a step, and of a step of the same model without a group:
what a step takes longer is communication. All ranks share the first GPU. --cpu runs it without one, to see that it works.
"""

import argparse
import json
import os
import statistics
import subprocess
import time

import torch
import torch.distributed as dist
from torch import nn

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def say(**row):
    if RANK == 0:
        print(json.dumps(row), flush=True)


def sync(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def groups(backend, gpu, sizes, seconds):
    """A row for each group and size: the median over calls of the slowest rank."""
    cpu = torch.device("cpu")
    halves = "half of the ranks each"
    for where, device in (("cpu", cpu), (gpu.type, gpu), (halves, cpu if RANK < WORLD // 2 else gpu)):
        if where == halves and backend == "gloo":
            continue  # It has no such groups.
        for size in sizes:
            row = {"op": "all-reduce", "through": "torch", "backend": backend, "ranks": WORLD, "tensors": where, "bytes": size}
            try:
                times, wrong = measure(torch.ones(size // 4, device=device), device, seconds)
            except RuntimeError as error:
                say(**row, unsupported=str(error)[:200])
                return
            say(**row, median_us=round(statistics.median(times) * 1e6, 1), calls=len(times), wrong=wrong)


def measure(tensor, device, seconds):
    times, begin, calls = [], time.perf_counter(), 0
    # All ranks make as many calls.
    most = torch.tensor([3], dtype=torch.int64)
    while calls < most.item():
        tensor.fill_(1)
        sync(device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        sync(device)
        took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        calls += 1
        if calls == 3:
            most[0] = max(5, min(500, int(seconds / took.item())))
            dist.broadcast(most, 0)
        elif calls > 3:
            times.append(took.item())
    wrong = int((tensor != WORLD).sum().item())
    return times or [time.perf_counter() - begin], wrong


def overlap(gpu, sizes):
    """How long copies from the GPU, the host's steps and copies to the GPU took, each, and all of it."""
    for size in sizes:
        tensor = torch.ones(size // 4, device="cpu" if RANK == 0 else gpu)
        for _ in range(5):
            tensor.fill_(1)
            dist.all_reduce(tensor)
            sync(gpu)
        lines = [line.strip() for line in dist.group.WORLD.explain().splitlines() if "through memory of the host" in line]
        said = [None] * WORLD
        dist.all_gather_object(said, lines)
        say(what="overlap", ranks=WORLD, bytes=size, wrong=int((tensor != WORLD).sum().item()), last_rank=said[-1])


def parts(gpu, sizes, command):
    """Medians in us, of this rank's own clock; the first and the last rank's, because the first works for all."""
    one = torch.ones(1)

    def timed(call, tensor, behind=True):
        held, whole = [], []
        for _ in range(300):
            tensor.fill_(1)
            sync(gpu)
            dist.barrier()
            begin = time.perf_counter_ns()
            call(tensor)
            returned = time.perf_counter_ns()
            if behind:
                sync(gpu)
            held.append(returned - begin)
            whole.append(time.perf_counter_ns() - begin)
        return [round(statistics.median(times[50:]) / 1e3, 1) for times in (held, whole)]

    for size in sizes:
        tensor = torch.ones(size // 4, device=gpu)
        rows = {
            "nothing, and the GPU is asked": timed(lambda _: None, tensor),
            "a kernel of torch's": timed(lambda tensor: tensor.add_(1), tensor),
            "all_reduce": timed(dist.all_reduce, tensor),
            "all_reduce, async_op, wait": timed(lambda tensor: dist.all_reduce(tensor, async_op=True).wait(), tensor),
            "broadcast": timed(lambda tensor: dist.broadcast(tensor, 0), tensor),
            "all_reduce of one float on the CPU": timed(lambda _: dist.all_reduce(one), tensor, behind=False),
            "barrier of hosts": timed(lambda _: dist.barrier(), tensor, behind=False),
        }
        if hasattr(dist.group.WORLD, "operations"):
            group = dist.group.WORLD.operations.group
            rows["all_reduce of the group, waited for"] = timed(group.all_reduce, tensor)
        said = [None] * WORLD
        dist.all_gather_object(said, rows)
        for what in rows:
            first, last = said[0][what], said[-1][what]
            row = {"what": what, "ranks": WORLD, "bytes": size, "first_held_us": first[0], "first_whole_us": first[1]}
            say(**row, last_held_us=last[0], last_whole_us=last[1])
    for _ in range(20):
        dist.all_reduce(tensor)
    sync(gpu)
    if command and RANK == 0:
        words = [command, "status", str(os.getpid()), "--last", "6", "--json"]
        for line in subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.splitlines():
            print(json.dumps({"what": "record", "line": json.loads(line)}), flush=True)


def model(device):
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(1024, 10)).to(device)


def steps(net, device, rank, count):
    """Trains; the losses and the median time of a step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    numbers = torch.Generator().manual_seed(rank)
    losses, times = [], []
    for _ in range(count):
        inputs = torch.randn(64, 1024, generator=numbers).to(device)
        targets = torch.randint(10, (64,), generator=numbers).to(device)
        sync(device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
        sync(device)
        times.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return losses, statistics.median(times[2:])


def train(backend, gpu, count):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    # All ranks at once, as in training: they share the GPU.
    dist.barrier()
    _, alone = steps(model(gpu), gpu, RANK, count)

    def ddp():
        return DistributedDataParallel(model(gpu))

    def fsdp2():
        net, mesh = model(gpu), init_device_mesh(gpu.type, (WORLD,))
        for layer in net[:-1]:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    for kind, make in (("ddp", ddp), ("fsdp2", fsdp2)):
        row = {"what": "training", "kind": kind, "backend": backend, "ranks": WORLD}
        try:
            losses, step = steps(make(), gpu, RANK, count)
        except (RuntimeError, NotImplementedError) as error:
            say(**row, unsupported=str(error)[:200])
            return
        all_losses = [None] * WORLD
        dist.all_gather_object(all_losses, losses)
        mean = [round(sum(each) / WORLD, 6) for each in zip(*all_losses)]
        communication = round((step - alone) * 1e3, 3)
        say(**row, step_ms=round(step * 1e3, 3), alone_ms=round(alone * 1e3, 3), communication_ms=communication, losses=mean)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["groups", "overlap", "parts", "train"])
    parser.add_argument("--backend", default="tensorwire")
    parser.add_argument("--sizes", default="65536,1048576,16777216,134217728")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--command", help="the command tensorwire")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    gpu = torch.device("cpu" if options.cpu else "cuda:0")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // WORLD))
    dist.init_process_group(options.backend)
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.what == "groups":
        groups(options.backend, gpu, sizes, options.seconds)
    elif options.what == "overlap":
        overlap(gpu, sizes)
    elif options.what == "parts":
        parts(gpu, sizes, options.command)
    else:
        train(options.backend, gpu, options.steps)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
