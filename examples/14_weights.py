"""A trainer hands its weights to inference workers after each step: one copy for each worker, straight into its own weights.

    tensorwire run -n 3 -- python examples/14_weights.py
"""

import sys

try:
    import numpy as np
except ImportError:
    print("numpy is missing: nothing to show")
    sys.exit(0)

import tensorwire

LAYERS, SIZE, VERSIONS = 3, 512, 4


def train(group):
    """Rank 0. Its weights are in memory that workers can map."""
    weights = [tensorwire.empty((SIZE, SIZE)) for _ in range(LAYERS)]
    with tensorwire.Listener() as listener:
        tell(group, listener.address)
        pipes = [listener.accept(60) for _ in range(group.world - 1)]
    for version in range(VERSIONS):
        for layer, weight in enumerate(weights):  # a step of training
            weight[:] = version * 10 + layer
        # To all workers at the same time. No worker waits for another one.
        sends = [pipe.send(*weights, metadata=b"%d" % version, async_op=True) for pipe in pipes]
        for send in sends:
            send.wait(60)  # the worker has them: they may be changed
    for pipe in pipes:
        pipe.finish()
    for pipe in pipes:
        assert int(pipe.recv(60).metadata) == VERSIONS
        pipe.close()
    return VERSIONS


def infer(group):
    """The others. They have weights of their own, which new ones take the place of."""
    weights, got = [np.zeros((SIZE, SIZE), "float32") for _ in range(LAYERS)], 0
    with tensorwire.Pipe.connect(tell(group), 60) as pipe:
        while (incoming := pipe.next(60)) is not None:
            version = int(incoming.metadata)
            incoming.read(into=weights)  # nothing comes before the worker says where
            assert all((weight == version * 10 + layer).all() for layer, weight in enumerate(weights))
            got += 1
            # Channels of the tensors: lent by the trainer, if it is on this host.
            channels = {part.channel for part in incoming.parts}
            assert channels <= {"share", "ring", "wire"}
        pipe.send(metadata=b"%d" % got)
        assert pipe.recv(60) is None
    return got


def tell(group, address=""):
    """All ranks get rank 0's address. Without a group it goes as a token does: by a pipe, a file, a variable."""
    line = np.frombuffer(bytearray(address.encode().ljust(256)), "uint8")
    group.broadcast(line, 0)
    return line.tobytes().decode().strip()


group = tensorwire.init()
if group.world == 1:
    print("a trainer without workers: start two ranks or more")
    sys.exit(0)
versions = train(group) if group.rank == 0 else infer(group)
megabytes = LAYERS * SIZE * SIZE * 4 / 1e6
print(f"rank {group.rank} of {group.world}: {versions} versions of {megabytes:.1f} MB of weights")
