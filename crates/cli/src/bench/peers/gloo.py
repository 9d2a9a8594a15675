"""A rank of Gloo that takes the orders of `tensorwire bench`; see order.rs and pattern.rs for the protocol."""

import os
import sys
import time

PERIOD = 1021
REPEATS = 64


def value(index):
    return 1 << (((index * 2654435761) & 0xFFFFFFFF) >> 16) % 3


def say(text):
    sys.stdout.write(text.replace("\n", " ") + "\n")
    sys.stdout.flush()


try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    say(f"no torch cannot be imported: {error}")
    sys.exit(0)

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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


class Tile:
    """The sequence that inputs and results are cut from."""

    def __init__(self, period):
        self.data = period.repeat(REPEATS + 1)

    def pieces(self, tensor, phase):
        start, step = phase % PERIOD, PERIOD * REPEATS
        for offset in range(0, tensor.numel(), step):
            piece = tensor[offset : offset + step]
            yield piece, self.data[start : start + piece.numel()]

    def write(self, tensor, phase):
        for piece, right in self.pieces(tensor, phase):
            piece.copy_(right)

    def wrong(self, tensor, phase):
        wrong = 0
        for piece, right in self.pieces(tensor, phase):
            if not torch.equal(piece, right):
                wrong += int((piece != right).sum())
        return wrong


def phase(of, iteration):
    return 3 * of + 5 * iteration


def reduced(plain, op, dtype):
    """The reduction of all ranks' inputs, for one period."""
    result = plain.data[phase(0, 0) : phase(0, 0) + PERIOD].clone()
    for other in range(1, world):
        start = phase(other, 0) % PERIOD
        result = COMBINE[op](result, plain.data[start : start + PERIOD])
    return result / world if op == "AVG" else result.to(dtype)


class Job:
    """One operation with its tensors."""

    def __init__(self, op, size, dtype, reduce):
        self.op = op
        dtype = getattr(torch, dtype)
        count = size // torch.empty(0, dtype=dtype).element_size()
        part = count // world
        self.part = part
        self.plain = Tile(torch.tensor([value(index) for index in range(PERIOD)]).to(dtype))
        if dtype == torch.bool:
            self.plain = Tile(torch.tensor([value(index) & 1 for index in range(PERIOD)]).to(dtype))
        self.sum = None
        if op in ("all-reduce", "reduce", "reduce-scatter"):
            self.sum = Tile(reduced(self.plain, reduce, dtype))
        self.reduce = getattr(dist.ReduceOp, reduce)
        root = rank == 0
        input_count = {"all-gather": part, "gather": part, "scatter": count if root else 0}.get(op, count)
        output_count = {"all-gather": count, "gather": count if root else 0, "all-to-all": count}.get(op, part)
        self.input = torch.zeros(input_count, dtype=dtype)
        self.output = torch.zeros(output_count if op in PART_OPS else 0, dtype=dtype)
        split = lambda whole: list(whole.split(part)) if root else None  # noqa: E731
        self.parts = split(self.output if op == "gather" else self.input) if op in ("gather", "scatter") else None

    def prepare(self, iteration):
        if self.op == "scatter":
            if rank == 0:
                for other, part in enumerate(self.parts):
                    self.plain.write(part, phase(other, iteration))
        else:
            self.plain.write(self.input, phase(rank, iteration))

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
            if rank % 2:
                dist.recv(data, rank - 1)
            elif rank + 1 < world:
                dist.send(data, rank + 1)
        elif op == "barrier":
            dist.barrier()
        else:
            raise RuntimeError(f"no operation {op}")

    def wrong(self, iteration):
        op, part = self.op, self.part
        if op == "all-reduce":
            return self.sum.wrong(self.input, phase(0, iteration))
        if op == "reduce" and rank == 0:
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
        if op == "send-recv" and rank % 2:
            return self.plain.wrong(self.input, phase(rank - 1, iteration))
        return 0


def carry_out(job, warmup, iterations, first):
    times, wrong = [], 0
    for iteration in range(first, first + warmup + iterations):
        job.prepare(iteration)
        dist.barrier()
        start = time.perf_counter_ns()
        job.call()
        times.append(time.perf_counter_ns() - start)
        wrong += job.wrong(iteration)
    return wrong, times[warmup:]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
    dist.barrier()
    say(f"ready {os.getpid()} Gloo of torch {torch.__version__}")
    kept, job = None, None
    for line in sys.stdin:
        op, size, dtype, reduce, _memory, _path, warmup, iterations, first = line.split()
        try:
            if kept != (op, size, dtype, reduce):
                kept, job = None, None
                job = Job(op, int(size), dtype, reduce)
                kept = (op, size, dtype, reduce)
            wrong, times = carry_out(job, int(warmup), int(iterations), int(first))
        except (RuntimeError, ValueError, AttributeError, TypeError, NotImplementedError) as error:
            kept, job = None, None
            say(f"no {error}")
            continue
        say(" ".join(["ok", str(wrong), "default", *map(str, times)]))


main()
