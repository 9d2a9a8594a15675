"""CUDA tensors of other processes. `python tests/python/test_lease_cuda.py` runs it without pytest.

Every check runs in a process of its own for each way that torch's allocator takes memory.
"""

import os
import queue
import subprocess
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from lease_peer import KEPT, PATIENCE, Peer, drop, fds, keep, listed, onward, until, write  # noqa: E402

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


def total(token):
    import tensorwire

    return float(tensorwire.open(token).double().sum())


def read_late(name, token):
    """Reads what is lent after a long time, and drops it at once."""
    import tensorwire
    import torch

    lent = tensorwire.open(token)
    torch.cuda._sleep(LONG)
    KEPT[name] = lent.clone()


def facts(token):
    import tensorwire

    it = tensorwire.open(token)
    return type(it).__name__, it.requires_grad, tuple(it.shape), it.stride(), str(it.dtype), it.device.type


def refused(token):
    import tensorwire

    try:
        tensorwire.open(token)
    except tensorwire.TensorwireError as error:
        return str(error)


def made(value, size):
    import tensorwire
    import torch

    KEPT["made"] = torch.full((size,), value, device="cuda")
    KEPT["tokens"] = [tensorwire.share(KEPT["made"]) for _ in range(2)]
    return KEPT["tokens"]


def serve_queue(theirs, ours):
    while (order := theirs.get(timeout=PATIENCE)) is not None:
        what, value = order
        if what == "sum":
            ours.put(float(value.double().sum()))
        elif what == "event":
            event, tensor = value
            event.wait()
            ours.put(float(tensor.double().sum()))
        elif what == "is done":
            ours.put((type(value).__name__, value.query()))
            value.synchronize()
        elif what == "alias":
            value[0].fill_(7)
            ours.put(value[1].tolist())
        elif what == "back":
            import tensorwire.torch

            tensorwire.torch.install_reductions()
            ours.put(value)
        elif what == "type":
            ours.put((type(value).__name__, value.requires_grad, tuple(value.shape)))
        del order, value


# Checks.


def check_layouts(torch, tensorwire, peer):
    base = torch.arange(24.0, device="cuda").view(4, 6)
    views = [base, base.t(), base[1], base[::2, 1::3], base[2, 3], base[:, 6:], base[0].expand(3, 6)]
    for view in views:
        lease = tensorwire.share(view)
        peer.call(keep, "it", lease)
        assert peer.call(listed, "it") == view.tolist()
        peer.call(drop, "it")
        assert peer.call(facts, tensorwire.share(view))[2:4] == (tuple(view.shape), view.stride())
        lease.wait(50)
    peer.call(keep, "it", tensorwire.share(base[1:]))
    peer.call(write, "it", (0, 0), -1.0)
    torch.cuda.synchronize()
    until(lambda: base[1, 0].item() == -1)
    peer.call(drop, "it")


def check_types(torch, tensorwire, peer):
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64):
        raw = torch.ones(48, dtype=torch.uint8, device="cuda").view(dtype)
        opened = tensorwire.open(tensorwire.share(raw))
        assert opened.dtype == dtype and opened.view(torch.uint8).tolist() == [1] * 48
        assert peer.call(facts, tensorwire.share(raw))[4] == str(dtype)
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    assert peer.call(facts, tensorwire.share(leaf))[:2] == ("Tensor", True)
    assert peer.call(facts, tensorwire.share(torch.nn.Parameter(leaf.detach())))[:2] == ("Parameter", True)
    assert peer.call(facts, tensorwire.share(torch.empty(0, 3, device="cuda")))[2::3] == ((0, 3), "cuda")
    for wrong in (leaf * 2, torch.ones(3, dtype=torch.complex64, device="cuda").conj()):
        try:
            tensorwire.share(wrong)
        except tensorwire.MisuseError:
            continue
        raise AssertionError("not refused")


def check_data_is_ready(torch, tensorwire, peer):
    """The producer's kernel still runs when the token is made; and again, with the same tensor."""
    numbers = torch.zeros(1 << 20, device="cuda")
    for value in range(1, 9):
        torch.cuda._sleep(LONG // 4)
        numbers.fill_(value)
        lease = tensorwire.share(numbers)
        assert peer.call(total, lease) == value * numbers.numel()
        lease.wait(50)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        torch.cuda._sleep(LONG)
        numbers.fill_(11)
        lease = tensorwire.share(numbers)
    assert peer.call(total, lease) == 11 * numbers.numel()


def check_release_is_behind_the_holders_work(torch, tensorwire, peer):
    numbers = torch.full((1 << 20,), 3.0, device="cuda")
    lease = tensorwire.share(numbers)
    peer.call(read_late, "copy", lease)
    lease.wait(50)
    numbers.fill_(4)
    torch.cuda.synchronize()
    assert set(peer.call(listed, "copy")) == {3.0}
    peer.call(drop, "copy")


def check_memory_of_a_dropped_tensor_is_not_used_again(torch, tensorwire, peer):
    """The holder still reads while the owner has dropped everything and allocates as much."""
    for value in range(1, 5):
        numbers = torch.full((1 << 20,), float(value), device="cuda")
        lease = tensorwire.share(numbers)
        peer.call(read_late, "copy", lease)
        del numbers, lease
        others = [torch.full((1 << 20,), -1.0, device="cuda") for _ in range(4)]
        assert set(peer.call(listed, "copy")) == {float(value)}
        peer.call(drop, "copy")
        del others


def check_new_memory_at_an_old_address(torch, tensorwire, peer):
    addresses = set()
    for value in range(1, 21):
        numbers = torch.full((8 << 20,), float(value), device="cuda")
        addresses.add(numbers.data_ptr())
        lease = tensorwire.share(numbers)
        assert peer.call(total, lease) == value * numbers.numel()
        lease.wait(50)
        allocated = torch.cuda.memory_allocated()
        size = numbers.nbytes
        del numbers, lease
        until(lambda: torch.cuda.memory_allocated() <= allocated - size)
        torch.cuda.empty_cache()
    print(f"      {len(addresses)} addresses for 20 tensors")


def check_holder_dies(torch, tensorwire, peer):
    before = torch.cuda.memory_allocated()
    with Peer() as victim:
        numbers = torch.ones(1 << 20, device="cuda")
        lease = tensorwire.share(numbers)
        victim.call(keep, "it", lease)
        assert lease.holders() == [victim.pid]
        del numbers
        victim.kill()
        lease.wait(50)
        assert lease.holders() == []
        del lease
    until(lambda: torch.cuda.memory_allocated() == before, "the memory of a dead holder's loan is not let go")


def check_owner_dies(torch, tensorwire, peer):
    with Peer() as owner:
        token, other = owner.call(made, 5.0, 1 << 20)
        lent = tensorwire.open(token)
        assert lent.sum().item() == 5 << 20
        owner.kill()
        try:
            tensorwire.open(other)
        except tensorwire.PeerDiedError as error:
            assert str(owner.pid) in str(error)
        else:
            raise AssertionError("the token of a dead process was not refused")
        print(f"      a view of a dead owner has a sum of {lent.sum().item():g} (5242880 before)")
        del lent
    assert torch.ones(3, device="cuda").sum().item() == 3, "this process goes on"


def check_onward(torch, tensorwire, peer):
    with Peer() as third:
        numbers = torch.arange(6.0, device="cuda")
        lease = tensorwire.share(numbers[1:])
        peer.call(keep, "it", lease)
        third.call(keep, "theirs", peer.call(onward, "it"))
        assert third.call(listed, "theirs") == [1, 2, 3, 4, 5]
        peer.call(drop, "it", "token it")
        assert lease.holders() == [peer.pid], "the middle has dropped it, and answers for the third"
        numbers += 1
        torch.cuda.synchronize()
        assert third.call(listed, "theirs") == [2, 3, 4, 5, 6]
        third.call(drop, "theirs")
        lease.wait(50)


def check_one_process(torch, tensorwire, peer):
    first, second = torch.ones(100, device="cuda"), torch.full((100,), 2.0, device="cuda")
    tokens = [tensorwire.share(first), tensorwire.share(second)]
    opened = [tensorwire.open(token) for token in tokens]
    assert [it.sum().item() for it in opened] == [100, 200]
    opened[0].fill_(9)
    assert first.sum().item() == 900 and opened[0].data_ptr() == first.data_ptr()
    again = tensorwire.open(tensorwire.share(opened[1]))
    assert again.sum().item() == 200
    del opened, again
    tokens[0].wait(50)


def check_dropping_waits_for_nothing(torch, tensorwire, peer):
    """A destructor that waited for a stream would stop every thread of the interpreter."""
    lent = tensorwire.open(tensorwire.share(torch.ones(1000, device="cuda")))
    torch.cuda._sleep(5 * LONG)
    lent.add_(1)
    del lent
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def check_names_of_gpus(torch, tensorwire, peer):
    """The other process calls the GPU by its UUID."""
    lease = tensorwire.share(torch.ones(7, device="cuda"))
    assert lease.device.startswith("GPU-")
    os.environ["CUDA_VISIBLE_DEVICES"] = lease.device
    try:
        with Peer() as other:
            assert other.call(total, lease) == 7
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]


def check_many_sends(torch, tensorwire, peer):
    numbers = torch.ones(1000, device="cuda")
    for _ in range(50):
        peer.call(total, tensorwire.share(numbers))
    before, allocated = fds(), torch.cuda.memory_allocated()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(2000):
        assert peer.call(total, tensorwire.share(numbers)) == 1000
    until(lambda: torch.cuda.memory_allocated() == allocated)
    assert fds() <= before + 2
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


def check_torch_multiprocessing(torch, tensorwire, peer):
    import tensorwire.torch
    import torch.multiprocessing as mp

    tensorwire.torch.install_reductions()
    spawn = mp.get_context("spawn")
    theirs, ours = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=serve_queue, args=(theirs, ours), daemon=True)
    process.start()

    def ask(what, value):
        theirs.put((what, value))
        return ours.get(timeout=PATIENCE)

    numbers = torch.ones(1000, device="cuda")
    for value in range(1, 21):
        torch.cuda._sleep(LONG // 20)
        numbers.fill_(value)
        assert ask("sum", numbers) == 1000 * value
    event = torch.cuda.Event(interprocess=True)
    numbers.fill_(3)
    event.record()
    assert ask("event", (event, numbers)) == 3000
    assert ask("alias", (numbers[:4], numbers[2:6])) == [7, 7, 3, 3]
    assert ask("type", torch.nn.Parameter(numbers)) == ("Parameter", True, (1000,))
    assert ask("type", torch.empty(0, 2, device="cuda")) == ("Tensor", False, (0, 2))
    back = ask("back", numbers)
    back.fill_(5)
    torch.cuda.synchronize()
    assert numbers.sum().item() == 5000
    torch.cuda.ipc_collect()
    here = spawn.Queue()
    here.put(numbers)
    assert here.get(timeout=PATIENCE).sum().item() == 5000
    theirs.put(None)
    process.join(PATIENCE)
    tensorwire.torch.uninstall_reductions()


def check_queue_behind_streams(torch, tensorwire, peer):
    """A queue pickles on a thread of its own; the data is ready behind the stream of who put it."""
    import tensorwire.torch
    import torch.multiprocessing as mp

    tensorwire.torch.install_reductions()
    spawn = mp.get_context("spawn")
    theirs, ours = spawn.Queue(), spawn.Queue(1)
    process = spawn.Process(target=serve_queue, args=(theirs, ours), daemon=True)
    process.start()
    numbers = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for value in range(1, 9):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG // 4)
            numbers.fill_(value)
            theirs.put(("sum", numbers))
        assert ours.get(timeout=PATIENCE) == value << 20
    # What does not fit into a queue is not sent, and not waited for.
    tensorwire.collect()
    before = tensorwire.lease_stats()["granted"]
    full = spawn.Queue(1)
    full.put(1)
    with torch.cuda.stream(stream):
        try:
            full.put(numbers, timeout=0.1)
        except queue.Full:
            pass
        else:
            raise AssertionError("it was not full")
    until(lambda: (tensorwire.collect(), tensorwire.lease_stats()["granted"])[1] <= before)
    # Events: torch refuses to send one that was not made for it.
    for late in (False, True):
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            if late:
                torch.cuda._sleep(5 * LONG)
            numbers.fill_(13)
            event.record()
        if not late:
            event.synchronize()
        theirs.put(("event", (event, numbers)))
        assert ours.get(timeout=PATIENCE) == 13 << 20
        numbers.fill_(0)
        torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(5 * LONG)
        event.record()
    theirs.put(("is done", event))
    kind, done = ours.get(timeout=PATIENCE)
    print(f"      the other process saw an event that was done: {done}; here: {event.query()}")
    assert kind == "Event"
    theirs.put(("is done", torch.cuda.Event()))
    assert ours.get(timeout=PATIENCE) == ("Event", True)
    theirs.put(None)
    process.join(PATIENCE)
    tensorwire.torch.uninstall_reductions()


def check_unshareable(torch, tensorwire, peer):
    """Memory of a pool that cannot leave the process."""
    numbers = torch.full((1 << 20,), 2.0, device="cuda")
    try:
        lease = tensorwire.share(numbers)
    except tensorwire.UnsupportedError as error:
        assert "pool" in str(error), error
        lease = tensorwire.share(numbers, copy=True)
        assert tensorwire.lease_stats()["copied_bytes"] == numbers.nbytes
    assert peer.call(total, lease) == 2 << 20


CHECKS = {name: value for name, value in list(globals().items()) if name.startswith("check_")}


def run_here():
    """All checks in this process; gives how many failed."""
    import tensorwire
    import torch

    failed = 0
    pool = "cudaMallocAsync" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    checks = {"check_unshareable": check_unshareable} if pool else CHECKS
    peer = Peer()
    for name, check in checks.items():
        print(f"   {name}", flush=True)
        try:
            check(torch, tensorwire, peer)
        except Exception:
            failed += 1
            print(f"   {name} FAILED\n{traceback.format_exc()}", flush=True)
            # It may hold what others do not expect.
            peer.kill()
            peer = Peer()
    peer.close()
    return failed


def run_with(variables):
    """All checks in a process with these variables."""
    return subprocess.run([sys.executable, __file__, "--here"], env=os.environ | variables, timeout=600).returncode


def main():
    if "--here" in sys.argv:
        return run_here()
    if not has_gpu():
        print("no GPU, or no torch: skipped")
        return 0
    failed = 0
    for name, variables in SETTINGS.items():
        print(name, flush=True)
        failed += run_with(variables)
    print("test result: ok" if failed == 0 else f"test result: FAILED, {failed} checks", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
elif __name__ != "__mp_main__":  # which is how processes of a plain program see this file
    import pytest

    @pytest.mark.skipif(not has_gpu(), reason="no GPU")
    @pytest.mark.timeout(700)
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_in_a_process(setting):
        assert run_with(SETTINGS[setting]) == 0
