"""Programs with one mistake, as users write them; one process is one rank. test_wrong_programs.py starts them.

A process reads orders from its input, one JSON object in each line, and answers with one. An order names a program, the
rank, the size of the world and the file to meet at. A program gives what the rank saw; a rank whose mistake is to end says
nothing.
"""

import json
import os
import signal
import sys
from datetime import timedelta

import tensorwire

#: The time-out of a group while it forms, and of operations that nothing is wrong with.
LONG = timedelta(seconds=100)
#: The time-out of an operation that must run into it.
SHORT = timedelta(seconds=1)
#: The rank that makes the mistake.
WRONG = 1


class Torch:
    """The calls of the programs, through torch."""

    def __init__(self, rank, world, path):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        dist.init_process_group("tensorwire", init_method=f"file://{path}", rank=rank, world_size=world, timeout=LONG)

    def ones(self, count, dtype="float32"):
        return self.torch.ones(count, dtype=getattr(self.torch, dtype))

    def set_timeout(self, timeout):
        group = self.dist.group.WORLD
        if hasattr(group, "operations"):
            # Before torch 2.14 the group is ours as a whole, and torch's function leaves it alone.
            group.set_timeout(timeout)
        else:
            self.dist.distributed_c10d._set_pg_timeout(timeout, group)

    def barrier(self):
        self.dist.barrier()

    def all_reduce(self, x):
        self.dist.all_reduce(x)

    def maximum(self, x):
        self.dist.all_reduce(x, op=self.dist.ReduceOp.MAX)

    def broadcast(self, x, root):
        self.dist.broadcast(x, src=root)

    def recv(self, x, source):
        self.dist.recv(x, src=source)

    def send(self, x, to):
        self.dist.send(x, dst=to)

    def close(self):
        if self.dist.is_initialized():
            self.dist.destroy_process_group()


class NumPy:
    """The calls of the programs, with arrays."""

    def __init__(self, rank, world, path):
        import numpy

        self.numpy = numpy
        self.group = tensorwire.Group.from_url(f"file://{path}", rank=rank, world=world, timeout=LONG)

    def ones(self, count, dtype="float32"):
        return self.numpy.ones(count, dtype=dtype)

    def set_timeout(self, timeout):
        self.group.set_timeout(timeout)

    def barrier(self):
        self.group.barrier()

    def all_reduce(self, x):
        self.group.all_reduce(x)

    def maximum(self, x):
        self.group.all_reduce(x, op="max")

    def broadcast(self, x, root):
        self.group.broadcast(x, root)

    def recv(self, x, source):
        self.group.recv(x, source)

    def send(self, x, to):
        self.group.send(x, to)

    def close(self):
        self.group.close()


def caught(call):
    """How a call ended."""
    try:
        call()
    except Exception as error:
        lines = str(error).splitlines()
        return {
            "class": [cls.__name__ for cls in type(error).__mro__],
            "text": str(error),
            "lines": len(lines),
            "rank": getattr(error, "rank", "missing"),
            "ranks": list(getattr(error, "ranks", ["missing"])),
        }
    return {"class": [], "text": "nothing was raised", "lines": 0, "rank": None, "ranks": []}


# Ranks that call different things. Every program begins with a barrier, so that what follows is operation 2.


def another_op(api, rank, world):
    x = api.ones(1000)
    return caught(lambda: api.maximum(x) if rank == WRONG else api.all_reduce(x))


def another_operation(api, rank, world):
    x = api.ones(1000)
    return caught(lambda: api.broadcast(x, 0) if rank == WRONG else api.all_reduce(x))


def another_size(api, rank, world):
    x = api.ones(1000 if rank == WRONG else 999)
    return caught(lambda: api.all_reduce(x))


def another_type(api, rank, world):
    x = api.ones(1000, "float64" if rank == WRONG else "float32")
    return caught(lambda: api.all_reduce(x))


def another_root(api, rank, world):
    """The last operation before the end: whoever does not notice in it has to notice in close."""
    x = api.ones(1000)

    def last():
        api.broadcast(x, rank)
        api.close()

    return caught(last)


# Ranks that do not come. The others run into their time-out.


def asleep(api, rank, world):
    if rank == WRONG:
        say("asleep")
        hear()
        return caught(lambda: api.all_reduce(api.ones(10)))
    api.set_timeout(SHORT)
    return caught(lambda: api.all_reduce(api.ones(10)))


def receiving(api, rank, world):
    """It waits for a message that nobody sends."""
    if rank == WRONG:
        return caught(lambda: api.recv(api.ones(10), 0))
    api.set_timeout(SHORT)
    return caught(lambda: api.all_reduce(api.ones(10)))


def stopped(api, rank, world):
    if rank == WRONG:
        os.kill(os.getpid(), signal.SIGSTOP)
        return caught(lambda: api.all_reduce(api.ones(10)))
    api.set_timeout(SHORT)
    say("waits")
    hear()
    return caught(lambda: api.all_reduce(api.ones(10)))


# Ranks that end.


def raising(api, rank, world):
    if rank == WRONG:
        raise ValueError("the loss is not a number\nand a second line")
    return caught(lambda: api.all_reduce(api.ones(10)))


def exiting(api, rank, world):
    if rank == WRONG:
        sys.exit(3)
    return caught(lambda: api.all_reduce(api.ones(10)))


def returning(api, rank, world):
    """It is done before the others are."""
    if rank == WRONG:
        sys.exit(0)
    return caught(lambda: api.all_reduce(api.ones(10)))


def killed(api, rank, world):
    if rank == WRONG:
        os.kill(os.getpid(), signal.SIGKILL)
    return caught(lambda: api.all_reduce(api.ones(10)))


def say(answer):
    sys.stdout.write(f"\n>> {json.dumps(answer)}\n")
    sys.stdout.flush()


def hear():
    line = sys.stdin.readline()
    if not line:
        sys.exit()
    return json.loads(line)


if __name__ == "__main__":
    # As in a script, the group is a variable of the module: it lives until the interpreter ends.
    kind = {"torch": Torch, "numpy": NumPy}[sys.argv[1]]
    while True:
        order = hear()
        api = kind(order["rank"], order["world"], order["path"])
        api.barrier()
        seen = globals()[order["program"]](api, order["rank"], order["world"])
        try:
            api.close()
        except Exception as error:
            seen["close"] = str(error)
        say(seen)
