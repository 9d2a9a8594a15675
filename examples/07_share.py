"""A tensor for another process, without a copy: a token goes through a queue; memory is let go when all are done.

    python examples/07_share.py
"""

import multiprocessing
import sys

try:
    import numpy as np
except ImportError:
    print("numpy is missing: nothing to show")
    sys.exit(0)

import tensorwire


def work(tokens, answers):
    """Another process: it opens what it gets, in the memory of whoever shared it."""
    while (token := tokens.get()) is not None:
        numbers = tensorwire.open(token)
        numbers += 1
        # It may be sent onward, from here to a third process.
        answers.put((float(numbers.sum()), tensorwire.share(numbers[:2])))
        del numbers


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    tokens, answers = spawn.Queue(), spawn.Queue()
    worker = spawn.Process(target=work, args=(tokens, answers))
    worker.start()

    # Memory that others can map. Ordinary arrays are refused, or copied with copy=True.
    numbers = tensorwire.empty((1000, 1000))
    numbers[:] = 1

    # A part of it is as good, whatever its strides.
    lease = tensorwire.share(numbers[::2, ::-1])
    tokens.put(lease)  # what arrives is its token
    total, back = answers.get()
    assert total == 1_000_000 and (numbers[::2] == 2).all() and (numbers[1::2] == 1).all()

    # What the worker sends back is our own memory, lent by it.
    rows = tensorwire.open(back)
    rows[0, 0] = 7
    assert numbers[0, 999] == 7
    assert lease.holders() == [worker.pid], "it holds our memory as long as we hold its loan"

    # Everybody lets go, in any order: then the memory is ours alone.
    del rows, back
    lease.wait(timeout=60)
    assert lease.holders() == []

    tokens.put(None)
    worker.join()
    assert worker.exitcode == 0
    print("a worker has added 1 to 500,000 numbers where they are, and has let go of them")
