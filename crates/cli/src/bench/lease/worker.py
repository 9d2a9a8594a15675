"""Round trips of a tensor between two Python processes, for `tensorwire bench lease`: a row of JSON for each way.

A round trip gives a tensor to another process, which opens it and drops it, and hears that it did.
"""

import json
import statistics
import sys
import time

import tensorwire
import tensorwire.torch
import torch
import torch.multiprocessing

#: Only against hanging.
PATIENCE = 60
WARMUP = 50


def open_tokens(line, _theirs, _ours):
    """Hears of tokens; whoever made one hears of its release."""
    while data := line.recv_bytes():
        tensorwire.open(tensorwire.Token(data))


def answer_pipe(line, _theirs, _ours):
    while line.recv() is not None:
        line.send_bytes(b"done")


def answer_queue(_line, theirs, ours):
    while (tensor := theirs.get(timeout=PATIENCE)) is not None:
        del tensor
        ours.put("done")


class Way:
    """One way to send tensors, with the process that receives them."""

    def __init__(self, library, medium, tensor, serve):
        self.library, self.medium, self.tensor = library, medium, tensor
        self.tokens = serve is open_tokens
        self.times = []
        spawn = torch.multiprocessing.get_context("spawn")
        self.line, line = spawn.Pipe()
        self.theirs, self.ours = spawn.Queue(), spawn.Queue()
        self.process = spawn.Process(target=serve, args=(line, self.theirs, self.ours), daemon=True)
        self.process.start()

    def once(self):
        if self.tokens:
            lease = tensorwire.share(self.tensor)
            self.line.send_bytes(lease.token.to_bytes())
            lease.wait(PATIENCE)
        elif self.medium == "pipe":
            self.line.send(self.tensor)
            self.line.recv_bytes()
        else:
            self.theirs.put(self.tensor)
            self.ours.get(timeout=PATIENCE)

    def measure(self, count):
        if self.library == "tensorwire":
            tensorwire.torch.install_reductions()
        else:
            tensorwire.torch.uninstall_reductions()
        for index in range(WARMUP + count):
            begin = time.perf_counter()
            self.once()
            if index >= WARMUP:
                self.times.append(time.perf_counter() - begin)

    def close(self):
        if self.tokens:
            self.line.send_bytes(b"")
        elif self.medium == "pipe":
            self.line.send(None)
        else:
            self.theirs.put(None)
        self.process.join(PATIENCE)


def main():
    size, rounds, count = map(int, sys.argv[1:4])
    device = sys.argv[4] if len(sys.argv) > 4 else "cuda" if torch.cuda.is_available() else "cpu"

    def tensor():
        return torch.ones(size, dtype=torch.uint8, device=device)

    # A token needs memory that can be shared as it is; torch moves ordinary memory of the CPU when it is first sent.
    shared = tensor() if device == "cuda" else tensorwire.torch.empty(size, dtype=torch.uint8)
    ways = [
        Way("tensorwire", "token", shared, open_tokens),
        Way("tensorwire", "pipe", tensor(), answer_pipe),
        Way("tensorwire", "queue", tensor(), answer_queue),
        Way("torch", "pipe", tensor(), answer_pipe),
        Way("torch", "queue", tensor(), answer_queue),
    ]
    for _ in range(rounds):
        for way in ways:
            way.measure(count)
    for way in ways:
        way.close()
        times = sorted(way.times)
        row = {
            "op": "lease",
            "device": device,
            "bytes": size,
            "library": way.library,
            "medium": way.medium,
            "rounds": len(times),
            "median_us": statistics.median(times) * 1e6,
            "p99_us": times[len(times) * 99 // 100] * 1e6,
            "torch": torch.__version__,
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
