"""Ranks meet at the launcher's store: each leaves a word, and the first one reads them all."""

import os

import tensorwire

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = tensorwire.TcpStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60)

store.set(f"word/{rank}", f"hello from process {os.getpid()}")
if rank == 0:
    # Waits for all of them; a rank that never comes is named by its key in the error.
    for other, word in enumerate(store.multi_get([f"word/{other}" for other in range(world)])):
        print(f"rank {other}: {word.decode()}")
store.barrier("done", world)
