"""Calls over pipes: NumPy arrays and tensors of torch there and back, handlers that fail, calls that are late or given up."""

import asyncio
import threading

import pytest

import tensorwire
from lease_peer import KEPT, Peer, run
from tensorwire.rpc import Answer, Rpc

np = pytest.importorskip("numpy")

#: Only there against hanging.
PATIENCE = 60
LARGE = 8 << 20


@pytest.fixture(scope="module")
def peer():
    with Peer() as peer:
        yield peer


@pytest.fixture
def rpc(peer):
    """To a process that has the handlers below."""
    with tensorwire.Listener() as listener:
        peer.call(start, listener.address)
        with Rpc(listener.accept(PATIENCE), {"half": half}) as rpc:
            yield rpc


def start(address):
    """In the other process: answers calls until the other end has closed."""
    KEPT["begun"], KEPT["ended"], KEPT["open"] = [threading.Semaphore(0) for _ in range(3)]
    rpc = Rpc(tensorwire.Pipe.connect(address, PATIENCE), handlers())
    KEPT["rpc"] = rpc

    def serve():
        with rpc:
            rpc.wait()

    KEPT["thread"] = thread = threading.Thread(target=serve, daemon=True)
    thread.start()


def handlers():
    return {
        "echo": echo,
        "add": lambda call: sum(call.read().tensors),
        "divide": lambda call: str(100 // int(call.metadata)).encode(),
        "silent": lambda call: None,
        "object": lambda call: object(),
        "half": half,
        "back": lambda call: KEPT["rpc"].call("half", metadata=call.metadata, timeout=call.left),
        "view": view,
        "keep": lambda call: KEPT.update(call=call),
        "kept": lambda call: KEPT["call"].read(),
        "hold": hold,
        "until": lambda call: (KEPT[call.metadata.decode()].acquire(timeout=PATIENCE) and b"yes") or b"no",
        "open": lambda call: KEPT["open"].release(),
    }


def echo(call):
    assert call.name == "echo" and call.wanted and 0 < call.left
    message = call.read()
    return Answer(*message.tensors, metadata=message.metadata, payloads=message.payloads)


def half(call):
    return str(int(call.metadata) / 2).encode()


def view(call):
    """Looks at the caller's memory."""
    message = call.read(views=[0])
    return np.array(message.tensors[0][:3]), np.array([call.parts[0].channel == "share"])


def hold(call):
    """Waits until it is told, or until nobody wants the answer."""
    KEPT["begun"].release()
    while call.wanted and not KEPT["open"].acquire(timeout=0.01):
        pass
    if not call.wanted:
        KEPT["ended"].release()
    return b"opened"


def happens(rpc, what):
    assert rpc.call("until", metadata=what.encode(), timeout=PATIENCE).metadata == b"yes"


def test_there_and_back(rpc):
    # Of other tests.
    lent = tensorwire.lease_stats()["granted"]
    large = tensorwire.empty((LARGE // 8,), "float64")
    large[:] = np.arange(LARGE // 8)
    tensors = [np.arange(6.0).reshape(2, 3).T, large, np.ones(LARGE // 8), np.zeros((0, 3), "int16")]
    answer = rpc.call("echo", *tensors, metadata=b"abc", payloads=[b"one", b""], timeout=PATIENCE)
    assert answer.metadata == b"abc" and [bytes(payload) for payload in answer.payloads] == [b"one", b""]
    for got, wanted in zip(answer.tensors, tensors):
        assert got.dtype == wanted.dtype and np.array_equal(got, wanted)
    place = np.zeros(3)
    answer = rpc.call("add", np.ones(3), np.arange(3.0), into=[place])
    assert answer.tensors[0] is place and place.tolist() == [1, 2, 3]
    assert rpc.call("silent").tensors == []
    assert rpc.call("back", metadata=b"7").metadata == b"3.5"
    seen = rpc.call("view", large, timeout=PATIENCE).tensors
    assert seen[0].tolist() == [0, 1, 2] and seen[1].all()
    assert tensorwire.lease_stats()["granted"] <= lent
    assert "ring" in rpc.explain() and rpc.peer.pid > 0


def test_torch(rpc):
    torch = pytest.importorskip("torch")
    answer = rpc.call("add", torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(answer.tensors[0], torch.full((3,), 2, dtype=torch.bfloat16))


def test_failures(rpc):
    assert rpc.call("divide", metadata=b"5").metadata == b"20"
    with pytest.raises(tensorwire.PeerError, match=r'pid \d+\) failed in "divide": ZeroDivisionError: ') as raised:
        rpc.call("divide", metadata=b"0")
    assert raised.value.kind == "failed"
    with pytest.raises(tensorwire.PeerError, match=r'has no "multiply".*"add", "back", "divide"'):
        rpc.call("multiply")
    with pytest.raises(tensorwire.PeerError, match='failed in "object": '):
        rpc.call("object")
    rpc.call("keep", np.ones(LARGE))
    with pytest.raises(tensorwire.PeerError, match="this call is answered"):
        rpc.call("kept")
    with pytest.raises(tensorwire.MisuseError, match="async_op brings tensors into new memory"):
        rpc.call("add", np.ones(3), into=[np.ones(3)], async_op=True)
    with pytest.raises(tensorwire.MisuseError, match="at least one"):
        Rpc(None, threads=0)
    assert rpc.call("divide", metadata=b"4").metadata == b"25"


def test_late_and_given_up(rpc):
    with pytest.raises(tensorwire.TimeoutError, match='calling "hold"'):
        rpc.call("hold", timeout=0.1)
    happens(rpc, "ended")
    answer = rpc.call("hold", async_op=True)
    happens(rpc, "begun")
    happens(rpc, "begun")
    assert not answer.done() and answer.withdraw()
    with pytest.raises(tensorwire.AbortedError):
        answer.wait()
    happens(rpc, "ended")
    answer = rpc.call("hold", async_op=True)
    happens(rpc, "begun")
    del answer
    happens(rpc, "ended")
    answer = rpc.call("hold", async_op=True)
    with pytest.raises(tensorwire.TimeoutError):
        answer.wait(0.01)
    rpc.call("open")
    assert answer.wait().metadata == b"opened" and answer.done() and answer.wait() is answer.wait()
    assert not answer.withdraw()


def test_hundreds(rpc):
    calls = [rpc.call("half", np.full(3, number), metadata=b"%d" % number, async_op=True) for number in range(300)]
    for number, call in reversed(list(enumerate(calls))):
        assert float(call.wait().metadata) == number / 2


def test_asyncio(rpc):
    async def main():
        calls = [rpc.call("echo", np.full(3, number), async_op=True) for number in range(50)]
        for number, answer in enumerate(await asyncio.gather(*calls)):
            assert answer.tensors[0].tolist() == [number] * 3
        with pytest.raises(tensorwire.PeerError, match="has no"):
            await rpc.call("multiply", async_op=True)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(rpc.call("hold", async_op=True), 0.1)
        await asyncio.to_thread(happens, rpc, "ended")
        assert (await rpc.call("half", metadata=b"3", async_op=True)).metadata == b"1.5"

    asyncio.run(main())


def test_closing(peer):
    with tensorwire.Listener() as listener:
        peer.call(start, listener.address)
        pipe = listener.accept(PATIENCE)
    rpc = Rpc(pipe)
    with pytest.raises(tensorwire.MisuseError, match="closed"):
        pipe.send(np.ones(3))
    with pytest.raises(tensorwire.MisuseError, match="closed"):
        Rpc(pipe)
    held = rpc.call("hold", async_op=True)
    rpc.close()
    rpc.close()
    with pytest.raises(tensorwire.TensorwireError):
        held.wait()
    with pytest.raises(tensorwire.MisuseError, match="this end was closed"):
        rpc.call("half")


def test_a_process_that_ends():
    """A handler that runs when its interpreter ends is waited for, for a moment; the caller hears of it."""
    code = """
import multiprocessing, os, signal, sys, threading, time, tensorwire
from tensorwire.rpc import Rpc

def child(address):
    begun = threading.Event()
    def hold(call):
        begun.set()
        time.sleep(60)
    rpc = Rpc(tensorwire.Pipe.connect(address), {"hold": hold})
    begun.wait()
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    listener = tensorwire.Listener()
    process = multiprocessing.get_context("fork").Process(target=child, args=(listener.address,))
    process.start()
    rpc = Rpc(listener.accept(60))
    try:
        rpc.call("hold", timeout=60)
    except tensorwire.PeerDiedError as error:
        print("heard" if str(process.pid) in str(error) and "hold" in str(error) else error)
"""
    assert run(code)[1].strip() == "heard"
