"""NumPy arrays between processes, without torch: results come in place, and shared memory saves copies.

    tensorwire run -n 3 -- python examples/04_numpy.py
"""

import sys

try:
    import numpy as np
except ImportError:
    print("numpy is missing: nothing to show")
    sys.exit(0)

import tensorwire

# Rank, world and the place to meet come from the launcher: tensorwire run, torchrun, mpirun, srun.
group = tensorwire.init()
rank, world = group.rank, group.world

# The array is the input and, when the call returns, the result.
total = np.full(5, rank + 1, dtype=np.float32)
group.all_reduce(total)
assert (total == world * (world + 1) / 2).all()

# A part of an array is as good: here the second column of a table. What is beside it stays as it was.
table = np.zeros((4, 3))
table[:, 1] = rank
group.all_reduce(table[:, 1], op="max")
assert (table[:, 1] == world - 1).all() and not table[:, [0, 2]].any()

# Each rank brings as many elements as it likes: rank 2 has three.
parts = [np.empty(other + 1, dtype=np.int64) for other in range(world)]
group.all_gather(parts, np.full(rank + 1, rank, dtype=np.int64))
assert [part.tolist() for part in parts] == [[other] * (other + 1) for other in range(world)]

# In shared memory other ranks read the array where it is, instead of a copy of it.
shared = tensorwire.empty((1000, 1000), np.float32)
shared[:] = rank
work = group.all_reduce(shared, op="avg", async_op=True)  # the rank may do something else meanwhile
work.wait()
assert np.allclose(shared, (world - 1) / 2)

if rank == 0:
    print(f"{world} ranks: sum {total[0]:g}, largest {table[0, 1]:g}, mean in shared memory {shared[0, 0]:g}")
group.barrier()
group.close()
