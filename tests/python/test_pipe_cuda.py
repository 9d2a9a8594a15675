"""CUDA tensors through pipes. `python tests/python/test_pipe_cuda.py` runs it without pytest.

Every check runs in a process of its own for each way that torch's allocator takes memory.
"""

import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lease_peer import KEPT, PATIENCE, Peer, until  # noqa: E402

#: How the process is set up: its variables.
SETTINGS = {
    "segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
    "expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "one hardware queue": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "stream-ordered": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
}

#: Some tenths of a second of a GPU.
LONG = 200_000_000


def has_gpu():
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


# What runs in a peer.


def start(name, address):
    """Runs a function with a pipe, on a thread."""

    def serve():
        import tensorwire

        try:
            with tensorwire.Pipe.connect(address, PATIENCE) as pipe:
                globals()[name](pipe)
        except BaseException as error:
            KEPT["error"] = error

    KEPT["error"] = None
    KEPT["thread"] = thread = threading.Thread(target=serve, daemon=True)
    thread.start()


def error():
    KEPT["thread"].join(PATIENCE)
    return None if KEPT["error"] is None else repr(KEPT["error"])


def echo(pipe):
    import torch

    for message in pipe:
        pipe.send(*message.tensors, metadata=message.metadata)
        del message
    torch.cuda.synchronize()


def sum_up(pipe):
    """Answers with the sum of what comes, as the CPU has it."""
    while (incoming := pipe.next()) is not None:
        message = incoming.read()
        pipe.send(message.tensors[0].double().sum().cpu())
        del message, incoming


def look(pipe):
    """Looks at what comes, and answers with its sum, which is made late."""
    import torch

    while (incoming := pipe.next()) is not None:
        views = [0] if incoming.parts[0].channel == "gpu_share" else []
        message = incoming.read(views=views)
        torch.cuda._sleep(LONG)
        total = message.tensors[0].double().sum()
        del message, incoming
        pipe.send(total.cpu())


def place_behind(pipe):
    """Reads into a place that the stream still uses, and onto devices."""
    import torch

    place = torch.full((1 << 20,), 1.0, device="cuda")
    before = torch.empty_like(place)
    for _ in range(4):
        place.fill_(1)
        torch.cuda._sleep(LONG)
        before.copy_(place)
        message = pipe.recv(into=[place])
        assert message.tensors[0] is place
        after = place.clone()
        pipe.send(before.cpu(), after.cpu())
    incoming = pipe.next()
    message = incoming.read(devices={0: "cpu", 1: "cuda", 2: torch.device("cuda", 0)})
    pipe.send(torch.tensor([tensor.is_cuda for tensor in message.tensors]), *message.tensors)
    assert pipe.next() is None


def serve_calls(pipe):
    """Answers with what it makes late of what comes, and what stands in its place, behind what its stream has to do."""
    import torch
    from tensorwire.rpc import Rpc

    place = torch.zeros(1 << 20, device="cuda")

    def double(call):
        (numbers,) = call.read().tensors
        torch.cuda._sleep(LONG)
        return numbers * 2

    def add_to_place(call):
        before = torch.empty_like(place)
        torch.cuda._sleep(LONG)
        before.copy_(place)
        call.read(into=[place])
        return before + place

    def echo_both(call):
        return call.read(devices={1: "cuda"}).tensors

    with Rpc(pipe, {"double": double, "add": add_to_place, "echo": echo_both}) as rpc:
        rpc.wait()
    torch.cuda.synchronize()


class Ends:
    """A pipe to a peer that runs a function."""

    def __init__(self, tensorwire, peer, function):
        self.listener = tensorwire.Listener()
        self.peer = peer
        peer.call(start, function.__name__, self.listener.address)
        self.pipe = self.listener.accept(PATIENCE)

    def __enter__(self):
        return self.pipe

    def __exit__(self, kind, *_):
        self.pipe.close()
        self.listener.close()
        if kind is None:
            assert (what := self.peer.call(error)) is None, what


def check_there_and_back(torch, tensorwire, peer):
    with Ends(tensorwire, peer, echo) as pipe:
        matrix = torch.arange(1 << 20, device="cuda", dtype=torch.float32).reshape(1024, 1024)
        cases = [
            [matrix],
            [matrix.t(), matrix[:, ::2], matrix[3:7], matrix[5:9]],
            [matrix[0, 0], torch.empty(3, 0, 2, device="cuda"), matrix[:1, :3]],
            [matrix.to(kind) for kind in (torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)],
            [matrix, torch.arange(10), matrix.cpu(), torch.ones(5, device="cuda")],
            [torch.ones(64 << 20, device="cuda", dtype=torch.uint8)],
        ]
        for tensors in cases:
            pipe.send(*tensors, metadata=b"echo")
            message = pipe.recv(PATIENCE)
            for got, sent in zip(message.tensors, tensors, strict=True):
                assert (got.device, got.dtype, got.shape) == (sent.device, sent.dtype, sent.shape)
                assert torch.equal(got, sent)
            del message, got
        shown = pipe.explain()
        print("      " + shown.replace("\n", "\n      ").rstrip())
        pipe.finish()


def check_views_of_one_storage_are_sent_once(torch, tensorwire, peer):
    with Ends(tensorwire, peer, echo) as pipe:
        numbers = torch.arange(1000, device="cuda")
        pipe.send(numbers[:600], numbers[400:])
        first, second = pipe.recv(PATIENCE).tensors
        first[500] = -1
        assert second[100].item() == -1
        pipe.finish()


def check_data_is_ready(torch, tensorwire, peer):
    """The sender's kernel still runs when the message is sent; and again, with the same tensor, on other streams."""
    numbers = torch.zeros(1 << 20, device="cuda")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    with Ends(tensorwire, peer, sum_up) as pipe:
        for value in range(1, 9):
            with torch.cuda.stream(streams[value % 2]):
                torch.cuda._sleep(LONG // 4)
                numbers.fill_(value)
                if value % 3:
                    pipe.send(numbers)
                else:
                    pipe.send(numbers, async_op=True).wait()
                # The reader has it.
                numbers.fill_(-1)
            assert pipe.recv(PATIENCE).tensors[0].item() == value << 20
            torch.cuda.synchronize()
        pipe.finish()


def check_views_hold_the_send_open(torch, tensorwire, peer):
    numbers = torch.ones(1 << 20, device="cuda")
    with Ends(tensorwire, peer, look) as pipe:
        for value in range(1, 4):
            numbers.fill_(value)
            pipe.send(numbers)
            numbers.fill_(-1)
            assert pipe.recv(PATIENCE).tensors[0].item() == value << 20
        pipe.finish()


def check_places_are_behind_the_stream(torch, tensorwire, peer):
    with Ends(tensorwire, peer, place_behind) as pipe:
        for value in range(2, 6):
            pipe.send(torch.full((1 << 20,), float(value), device="cuda"))
            before, after = pipe.recv(PATIENCE).tensors
            assert (before == 1).all() and (after == value).all()
        ones = torch.ones(1000)
        pipe.send(ones.cuda(), ones, ones * 2)
        where, *tensors = pipe.recv(PATIENCE).tensors
        assert where.tolist() == [False, True, True]
        assert [tensor.sum().item() for tensor in tensors] == [1000, 1000, 2000]
        pipe.finish()


def check_calls_are_in_the_order_of_streams(torch, tensorwire, peer):
    from tensorwire.rpc import Rpc

    numbers = torch.zeros(1 << 20, device="cuda")
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    with Ends(tensorwire, peer, serve_calls) as pipe, Rpc(pipe) as rpc:
        for value in range(1, 9):
            with torch.cuda.stream(streams[value % 2]):
                torch.cuda._sleep(LONG // 4)
                numbers.fill_(value)
                if value % 3:
                    answer = rpc.call("double", numbers, timeout=PATIENCE)
                else:
                    answer = rpc.call("double", numbers, async_op=True).wait(PATIENCE)
                # The other end has read it.
                numbers.fill_(-1)
                assert answer.tensors[0].is_cuda and (answer.tensors[0] == 2 * value).all()
            torch.cuda.synchronize()
        for value in range(1, 5):
            place = torch.full((1 << 20,), -1.0, device="cuda")
            torch.cuda._sleep(LONG // 4)
            added = rpc.call("add", torch.full((1 << 20,), float(value), device="cuda"), into=[place], timeout=PATIENCE)
            assert added.tensors[0] is place and (place == value + value - 1).all()
        ones = torch.ones(1000)
        first, second = rpc.call("echo", ones.cuda(), ones * 2, timeout=PATIENCE).tensors
        assert first.is_cuda and second.is_cuda
        assert (first.sum().item(), second.sum().item()) == (1000, 2000)


def check_nothing_of_calls_stays(torch, tensorwire, peer):
    from tensorwire.rpc import Rpc

    allocated = torch.cuda.memory_allocated()
    with Ends(tensorwire, peer, serve_calls) as pipe, Rpc(pipe) as rpc:
        for _ in range(100):
            rpc.call("echo", torch.ones(100_000, device="cuda"), torch.ones(10), timeout=PATIENCE)
    until(lambda: torch.cuda.memory_allocated() == allocated)
    until(lambda: tensorwire.lease_stats()["granted"] == 0)


def check_nothing_stays(torch, tensorwire, peer):
    allocated = torch.cuda.memory_allocated()
    with Ends(tensorwire, peer, echo) as pipe:
        for _ in range(300):
            pipe.send(torch.ones(100_000, device="cuda"))
            pipe.recv(PATIENCE)
        pipe.finish()
    until(lambda: torch.cuda.memory_allocated() == allocated)
    until(lambda: tensorwire.lease_stats()["granted"] == 0)


def check_a_peer_that_dies(torch, tensorwire, peer):
    numbers = torch.ones(1 << 20, device="cuda")
    with Peer() as victim:
        ends = Ends(tensorwire, victim, sum_up)
        ends.pipe.send(numbers)
        victim.kill()
        try:
            for _ in range(1000):
                ends.pipe.send(numbers, timeout=PATIENCE)
        except tensorwire.PeerDiedError as died:
            assert str(victim.pid) in str(died)
        else:
            raise AssertionError("nobody noticed")
        assert numbers.sum().item() == 1 << 20
        ends.listener.close()


def check_a_graph_is_refused(torch, tensorwire, peer):
    numbers = torch.ones(1000, device="cuda")
    with Ends(tensorwire, peer, echo) as pipe:
        pipe.send(numbers)
        pipe.recv(PATIENCE)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            try:
                pipe.send(numbers)
            except tensorwire.UnsupportedError as refused:
                assert "graph" in str(refused)
            else:
                raise AssertionError("not refused")
            numbers.add_(1)
        pipe.finish()


CHECKS = {name: value for name, value in list(globals().items()) if name.startswith("check_")}


def run_here():
    """All checks in this process; gives how many failed."""
    import tensorwire
    import torch

    failed = 0
    with Peer() as peer:
        for name, check in CHECKS.items():
            try:
                check(torch, tensorwire, peer)
                torch.cuda.synchronize()
                print(f"   ok {name}", flush=True)
            except Exception:
                failed += 1
                print(f"   FAILED {name}", flush=True)
                traceback.print_exc()
    return failed


def run_with(variables):
    """The same in a process of its own."""
    ended = subprocess.run([sys.executable, __file__, "here"], env=os.environ | variables, timeout=600)
    return ended.returncode


def main():
    if sys.argv[1:] == ["here"]:
        return min(run_here(), 100)
    if not has_gpu():
        print("no GPU, or no torch")
        return 0
    failed = 0
    for name, variables in SETTINGS.items():
        print(name, flush=True)
        failed += run_with(variables) != 0
    print("passed" if not failed else f"error: {failed} settings failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
elif __name__ != "__mp_main__":  # which is how processes of a plain program see this file
    import pytest

    @pytest.mark.skipif(not has_gpu(), reason="no GPU")
    @pytest.mark.timeout(700)
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_in_a_process(setting):
        assert run_with(SETTINGS[setting]) == 0
