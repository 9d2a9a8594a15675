"""A rank of torch.distributed that takes the orders of `tensorwire bench`; order.rs and pattern.rs say how.

Its arguments are the backend, the device, what this rank does in send-recv, and whether that is to another host. What is measured is the same program, whoever carries the bytes."""

import functools
import os
import sys
import time


def say(text):
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()


try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    say(f"no torch cannot be imported: {error}")
    sys.exit(0)

from sparse import Sparse
from step import Step

PERIOD = 1021
REPEATS = 64
PART_OPS = ("all-gather", "gather", "scatter", "reduce-scatter", "all-to-all")
COMBINE = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "AVG": torch.add,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
turn, _, partner = sys.argv[3].partition(":")
partner, far = int(partner or rank), sys.argv[4] == "far"
TOKEN = torch.zeros(8, dtype=torch.uint8)


def value(index):
    return 1 << (((index * 2654435761) & 0xFFFFFFFF) >> 16) % 3


class Tile:
    """The sequence that inputs and results are cut from."""

    def __init__(self, period, device="cpu"):
        self.data = period.repeat(REPEATS + 1).to(device)

    def pieces(self, tensor, phase):
        start, step = phase % PERIOD, PERIOD * REPEATS
        for offset in range(0, tensor.numel(), step):
            piece = tensor[offset : offset + step]
            yield piece, self.data[start : start + piece.numel()]

    def write(self, tensor, phase):
        for piece, right in self.pieces(tensor, phase):
            piece.copy_(right)

    def wrong(self, tensor, phase):
        """How many elements are not what they must be: compared as bytes, which torch can do for every type."""
        wrong = 0
        for piece, right in self.pieces(tensor, phase):
            piece, right = piece.view(torch.uint8), right.view(torch.uint8)
            if not torch.equal(piece, right):
                wrong += int((piece != right).view(-1, tensor.element_size()).any(1).sum())
        return wrong


def phase(of, iteration):
    return 3 * of + 5 * iteration


def reduced(plain, op, dtype):
    """The reduction of all ranks' inputs, for one period, in a type for which torch has every function."""
    if dtype == torch.bool or dtype.is_complex:
        wide = dtype
    else:
        wide = torch.float64 if dtype.is_floating_point else torch.int64
    data = plain.data.cpu().to(wide)
    result = data[phase(0, 0) : phase(0, 0) + PERIOD].clone()
    for other in range(1, world):
        start = phase(other, 0) % PERIOD
        result = COMBINE[op](result, data[start : start + PERIOD])
    return (result / world if op == "AVG" else result).to(dtype)


def meet():
    """The two ranks of a message to another host meet; the receiver goes on first (rank/job.rs says why)."""
    if turn == "send":
        dist.send(TOKEN, partner)
        dist.recv(TOKEN, partner)
    elif turn == "recv":
        dist.recv(TOKEN, partner)
        dist.send(TOKEN, partner)


class Job:
    """One operation with its tensors."""

    def __init__(self, op, size, dtype, reduce, empty, device):
        self.op, self.device = op, device
        dtype = getattr(torch, dtype)
        count = size // torch.empty(0, dtype=dtype).element_size()
        part = count // world
        self.part = part
        ones = 1 if dtype == torch.bool else 7
        self.plain = Tile(torch.tensor([value(index) & ones for index in range(PERIOD)]).to(dtype), device)
        self.sum = None
        if op in ("all-reduce", "reduce", "reduce-scatter"):
            self.sum = Tile(reduced(self.plain, reduce, dtype), device)
        self.reduce = getattr(dist.ReduceOp, reduce)
        root = rank == 0
        inputs = {"all-gather": part, "gather": part, "scatter": count if root else 0}.get(op, count)
        outputs = {"all-gather": count, "gather": count if root else 0, "all-to-all": count}.get(op, part)
        if op in ("memcpy", "memcpy-alone"):
            outputs = count
        elif op not in PART_OPS:
            outputs = 0
        self.input, self.output = empty(inputs, dtype=dtype), empty(outputs, dtype=dtype)
        # Pages come when they are first written: not in a call that is timed.
        for tensor in (self.input, self.output):
            tensor.view(torch.uint8).zero_()
        whole = self.output if op == "gather" else self.input
        self.parts = list(whole.split(part)) if op in ("gather", "scatter") and root else None

    def prepare(self, iteration, write=True):
        if not write:
            pass
        elif self.op == "scatter":
            if rank == 0:
                for other, part in enumerate(self.parts):
                    self.plain.write(part, phase(other, iteration))
        else:
            self.plain.write(self.input, phase(rank, iteration))
        self.finish()
        if self.op == "send-recv" and far:
            meet()
        elif self.op != "memcpy-alone":
            dist.barrier()

    def finish(self):
        """Waits until the GPU has done all that it was given."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def call(self):
        op, data = self.op, self.input
        if op == "all-reduce":
            dist.all_reduce(data, self.reduce)
        elif op == "reduce":
            dist.reduce(data, 0, self.reduce)
        elif op == "broadcast":
            dist.broadcast(data, 0)
        elif op == "all-gather":
            dist.all_gather_into_tensor(self.output, data)
        elif op == "gather":
            dist.gather(data, self.parts, 0)
        elif op == "scatter":
            dist.scatter(self.output, self.parts, 0)
        elif op == "reduce-scatter":
            dist.reduce_scatter_tensor(self.output, data, self.reduce)
        elif op == "all-to-all":
            dist.all_to_all_single(self.output, data)
        elif op == "send-recv":
            if turn == "recv":
                dist.recv(data, partner)
            elif turn == "send":
                dist.send(data, partner)
        elif op == "barrier":
            dist.barrier()
        elif op == "memcpy":
            # Until all are done: ranks that share a core copy one after the other.
            self.output.copy_(data)
            dist.barrier()
        elif op == "memcpy-alone":
            if rank == 0:
                self.output.copy_(data)
        else:
            raise RuntimeError(f"no operation {op}")
        self.finish()

    def wrong(self, iteration):
        op, part = self.op, self.part
        if op == "all-reduce" or op == "reduce" and rank == 0:
            return self.sum.wrong(self.input, phase(0, iteration))
        if op == "broadcast":
            return self.plain.wrong(self.input, phase(0, iteration))
        if op == "all-gather" or op == "gather" and rank == 0:
            return sum(
                self.plain.wrong(self.output[other * part : (other + 1) * part], phase(other, iteration))
                for other in range(world)
            )
        if op == "scatter":
            return self.plain.wrong(self.output, phase(rank, iteration))
        if op == "reduce-scatter":
            return self.sum.wrong(self.output, phase(0, iteration) + rank * part)
        if op == "all-to-all":
            return sum(
                self.plain.wrong(
                    self.output[other * part : (other + 1) * part], phase(other, iteration) + rank * part
                )
                for other in range(world)
            )
        if op == "send-recv" and turn == "recv":
            return self.plain.wrong(self.input, phase(partner, iteration))
        return 0


def carry_out(job, warmup, iterations, first):
    """Only the call is timed; before it, inputs are written and all ranks meet; after it, results are checked.

    On GPUs this is done for the calls that are not timed alone, as it is for tensorwire."""
    times, wrong = [], 0
    for iteration in range(first, first + warmup + iterations):
        checked = job.device == "cpu" or iteration < first + warmup
        job.prepare(iteration, checked)
        start = time.perf_counter_ns()
        job.call()
        times.append(time.perf_counter_ns() - start)
        if checked:
            wrong += job.wrong(iteration)
    return wrong, times[warmup:]


def place(device):
    """Where this rank's tensors live, as torch calls it: ranks take GPUs in turn."""
    if device == "host":
        return "cpu"
    if not torch.cuda.is_available():
        say(f"no torch {torch.__version__} finds no GPU")
        sys.exit(0)
    number = int(device.partition(":")[2] or rank % torch.cuda.device_count())
    torch.cuda.set_device(number)
    return f"cuda:{number}"


def ready(backend):
    """Joins the ranks, and what they are in words."""
    about = f"Gloo of torch {torch.__version__}"
    if backend != "gloo":
        try:
            import tensorwire
        except ImportError as error:
            say(f"no tensorwire cannot be imported: {error}")
            sys.exit(0)
        about = f"tensorwire {tensorwire.__version__} through torch {torch.__version__}"
    try:
        dist.init_process_group(backend)
        dist.barrier()
    except Exception as error:
        say(f"no {backend} cannot be used: {error}")
        sys.exit(0)
    return about


def main():
    backend, device = sys.argv[1], place(sys.argv[2])
    torch.set_num_threads(1)
    say(f"ready {os.getpid()} {ready(backend)}")
    jobs = {}
    for line in sys.stdin:
        op, size, dtype, reduce, memory, _path, warmup, iterations, first = line.split()
        wanted = (op, size, dtype, reduce, memory)
        try:
            if wanted not in jobs and op.startswith("step"):
                # Steps with and without shared memory take turns: both stay.
                jobs[wanted] = Step(int(size), memory == "shared", op == "step-view")
            elif wanted not in jobs and op.startswith("all-reduce-sparse"):
                jobs.clear()
                jobs[wanted] = Sparse(op.partition(":")[2], int(size), rank, world, device)
            elif wanted not in jobs:
                # Its memory is given back before the next one takes some.
                jobs.clear()
                jobs[wanted] = Job(op, int(size), dtype, reduce, allocator(backend, memory, device), device)
            wrong, times = carry_out(jobs[wanted], int(warmup), int(iterations), int(first))
        except (RuntimeError, ValueError, AttributeError, TypeError, NotImplementedError) as error:
            jobs.clear()
            say(f"no {reason(error, op, backend, device)}")
            continue
        say(" ".join(["ok", str(wrong), "default", *map(str, times)]))
    # Nobody leaves while another still needs it.
    dist.barrier()
    dist.destroy_process_group()


def reason(error, op, backend, device):
    """Why an operation is not measured, in one line. What comes behind the first one is torch's stack."""
    lines = str(error).splitlines() or [type(error).__name__]
    if backend != "gloo" or device == "cpu":
        return lines[0]
    return f"unsupported: Gloo of torch {torch.__version__} refuses {op} of CUDA tensors: {lines[0]}"


def allocator(backend, memory, device):
    if backend != "tensorwire" or memory != "shared":
        return functools.partial(torch.empty, device=device)
    import tensorwire.torch

    return tensorwire.torch.empty


main()
