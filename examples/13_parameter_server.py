"""A parameter server: workers push gradients and get the weights back, each at its own pace. No worker waits for another one.

    tensorwire run -n 3 -- python examples/13_parameter_server.py
"""

import sys
import threading

try:
    import numpy as np
except ImportError:
    print("numpy is missing: nothing to show")
    sys.exit(0)

import tensorwire
from tensorwire.rpc import Rpc

SIZE, STEPS, RATE = 1000, 30, 0.1
WANTED = np.linspace(-1, 1, SIZE)  # what the workers' data would teach


def serve(group):
    """Rank 0: it has the weights, and what workers may call."""
    weights, lock = np.zeros(SIZE), threading.Lock()

    def push(call):
        # Calls of several workers run at the same time, on threads of the library.
        (gradient,) = call.read().tensors
        with lock:
            weights[:] -= RATE * gradient
            return weights.copy()

    def pull(call):
        with lock:
            return weights.copy()

    with tensorwire.Listener() as listener:
        tell(group, listener.address)
        servers = [Rpc(listener.accept(60), {"push": push, "pull": pull}) for _ in range(group.world - 1)]
    for server in servers:
        server.wait(60)  # until its worker has closed
        server.close()
    return weights


def work(group):
    """The others: each has data of its own, and knows no other worker."""
    random = np.random.default_rng(group.rank)
    with Rpc(tensorwire.Pipe.connect(tell(group), 60)) as server:
        (weights,) = server.call("pull").tensors
        for _ in range(STEPS):
            gradient = weights - WANTED + random.normal(0, 0.01, SIZE)
            (weights,) = server.call("push", gradient, timeout=60).tensors
        try:
            server.call("pop")
        except tensorwire.PeerError as error:
            assert 'has no "pop"' in str(error) and '"pull", "push"' in str(error)
    return weights


def tell(group, address=""):
    """All ranks get rank 0's address. Without a group it goes as a token does: by a pipe, a file, a variable."""
    line = np.frombuffer(bytearray(address.encode().ljust(256)), "uint8")
    group.broadcast(line, 0)
    return line.tobytes().decode().strip()


group = tensorwire.init()
if group.world == 1:
    print("a server without workers: start two ranks or more")
    sys.exit(0)
weights = serve(group) if group.rank == 0 else work(group)
distance = abs(weights - WANTED).max()
assert distance < 0.2, distance
print(f"rank {group.rank} of {group.world}: the weights are within {distance:.2f} of what is wanted")
