"""Symmetric memory: each rank writes straight into its neighbour's memory, and says so with a signal.

    tensorwire run -n 3 -- python examples/09_symmetric.py
"""

import sys

try:
    import numpy as np
except ImportError:
    print("numpy is missing: nothing to show")
    sys.exit(0)

import tensorwire
from tensorwire import symmetric

ROUNDS, COUNT = 5, 1000

group = tensorwire.init()
before, behind = (group.rank - 1) % group.world, (group.rank + 1) % group.world

# Memory that others can map, as much on every rank. The ranks meet, and then each reaches the memory of all.
mine = symmetric.empty(COUNT, "int64")
mine[:] = 0
handle = symmetric.rendezvous(mine, group)
theirs = handle.buffer(behind)

WRITTEN, READ = 0, 1  # channels: signals of one are not taken for signals of the other

# Numbers travel round the ring. No rank copies them to itself: each writes where they are needed.
numbers = np.full(COUNT, group.rank)
for step in range(ROUNDS):
    theirs[:] = numbers
    handle.put_signal(behind, WRITTEN)
    handle.wait_signal(before, WRITTEN)  # every wait has a deadline, the group's unless one is given
    numbers = mine + 1
    # The rank before may write again.
    handle.put_signal(before, READ)
    handle.wait_signal(behind, READ)

start = (group.rank - ROUNDS) % group.world
assert (numbers == start + ROUNDS).all()

# Collectives on such memory go straight between the ranks, too.
mine[:] = numbers
symmetric.all_reduce(mine, "max", group)
assert (mine == group.world - 1 + ROUNDS).all()

# All are done with this rank's memory before it goes.
handle.barrier()
handle.close()
print(f"rank {group.rank} of {group.world}: numbers of rank {start} have come here from memory to memory, {ROUNDS} hops")
