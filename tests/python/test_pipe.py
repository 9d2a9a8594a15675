"""Pipes: NumPy arrays and tensors of torch to another process and back, and what goes wrong on the way."""

import asyncio
import gc
import threading
import time

import pytest

import pages
import tensorwire
from lease_peer import KEPT, Peer, run
from tensorwire.pipe import Message

np = pytest.importorskip("numpy")

#: Only there against hanging.
PATIENCE = 60
LARGE = 8 << 20


@pytest.fixture(scope="module")
def peer():
    with Peer() as peer:
        yield peer


@pytest.fixture
def pipe(peer):
    """A pipe to a process that sends back what it gets until its end."""
    with tensorwire.Listener() as listener:
        connect(peer, listener, echo)
        with listener.accept(PATIENCE) as pipe:
            yield pipe


def connect(peer, listener, function, *args):
    peer.call(start, function.__name__, listener.address, *args)


def start(name, address, *args):
    """In the other process: runs a function with a pipe, on a thread."""

    def serve():
        try:
            with tensorwire.Pipe.connect(address, PATIENCE) as pipe:
                globals()[name](pipe, *args)
        except Exception as error:
            KEPT["error"] = error

    KEPT["thread"] = thread = threading.Thread(target=serve, daemon=True)
    thread.start()


def echo(pipe):
    for message in pipe:
        pipe.send(*message.tensors, metadata=message.metadata, payloads=message.payloads)
        del message


def drop_all(pipe):
    while pipe.next() is not None:
        pass


def view_for_a_while(pipe):
    """Looks at a tensor, says what it sees, and lets go when it is told."""
    incoming = pipe.next()
    message = incoming.read(views=[0])
    pipe.send(message.tensors[0][:3].copy(), metadata=incoming.parts[0].channel.encode())
    pipe.recv()
    del message
    gc.collect()
    drop_all(pipe)


def there_and_back(pipe, *tensors, **how):
    pipe.send(*tensors, **how)
    return pipe.recv(PATIENCE)


LAYOUTS = {
    "whole": lambda array: array,
    "row": lambda array: array[2],
    "column": lambda array: array[:, 3],
    "transposed": lambda array: array.T,
    "backwards": lambda array: array[::-1, ::-2],
    "0-dim": lambda array: array[1, 2, ...],
    "no elements": lambda array: array[:, 6:],
    "repeated": lambda array: np.broadcast_to(array[0], (3, 6)),
    "read-only": lambda array: np.frombuffer(array.tobytes(), "int64"),
}


@pytest.mark.parametrize("rows", [4, 40_000])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(pipe, layout, shared, rows):
    array = tensorwire.empty((rows, 6), "int64") if shared else np.empty((rows, 6), "int64")
    array[:] = np.arange(rows * 6).reshape(rows, 6)
    sent = layout(array)
    (got,) = there_and_back(pipe, sent).tensors
    assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
    assert (got == sent).all()
    got[...] = 0  # it is the reader's


def test_types(pipe):
    for name in ("bool", "int8", "uint16", "float16", "float32", "float64", "complex64", "complex128", "uint64"):
        array = np.arange(10).astype(name)
        (got,) = there_and_back(pipe, array).tensors
        assert got.dtype == array.dtype
        assert (got == array).all()
    assert list(there_and_back(pipe, bytearray(b"abc")).tensors[0]) == [97, 98, 99]


def test_metadata_and_payloads(pipe):
    message = there_and_back(pipe)
    assert (message.metadata, message.payloads, message.tensors) == (b"", [], [])
    large = bytes(range(256)) * 20_000
    message = there_and_back(pipe, metadata=b"x" * 100_000, payloads=[b"", b"two", large, np.ones(3)])
    assert message.metadata == b"x" * 100_000
    assert [bytes(payload) for payload in message.payloads] == [b"", b"two", large, np.ones(3).tobytes()]
    assert repr(message) == "<tensorwire.pipe.Message of 100000 bytes, payloads of [0, 3, 5120000, 24], 0 tensors>"


def test_views_of_one_array_are_sent_once(pipe):
    array = np.arange(1_000_000)
    front, back = there_and_back(pipe, array[:600_000], array[500_000:]).tensors
    front[500_000] = -1
    assert back[0] == -1


def test_places(pipe):
    array = np.arange(24.0).reshape(4, 6)
    first, second, third = np.zeros((4, 12))[:, ::2], np.zeros((4, 6)), np.zeros((4, 6), order="F")
    pipe.send(array, array + 1, array + 2)
    message = pipe.recv(PATIENCE, into=[first, None, third])
    assert message.tensors[0] is first
    assert message.tensors[2] is third
    assert (first == array).all()
    assert (message.tensors[1] == array + 1).all()
    assert (third == array + 2).all()
    pipe.send(array)
    incoming = pipe.next(PATIENCE)
    (part,) = incoming.parts
    assert (part.dtype, part.shape, part.channel) == ("float64", (4, 6), "basic")
    for wrong in ({1: second}, {0: np.zeros(24)}, {0: np.zeros((4, 6), "float32")}):
        with pytest.raises(tensorwire.MisuseError):
            incoming.read(wrong)
    with pytest.raises(tensorwire.UnsupportedError, match="memory that its sender lends"):
        incoming.read(views=[0])
    with pytest.raises(tensorwire.MisuseError, match="read-only"):
        incoming.read([np.broadcast_to(second[0], (4, 6))])
    assert (incoming.read({0: second}).tensors[0] == array).all()
    with pytest.raises(tensorwire.MisuseError, match="has been read"):
        incoming.read()


def test_devices(pipe):
    pipe.send(np.arange(5))
    incoming = pipe.next(PATIENCE)
    for wrong in ("tpu", "cuda:x", "cuda:-1"):
        with pytest.raises(tensorwire.MisuseError, match="comes to 'cpu'"):
            incoming.read(devices={0: wrong})
    with pytest.raises(tensorwire.MisuseError, match="tensor 1 of a message"):
        incoming.read(devices={1: "cpu"})
    assert incoming.read(devices={0: "cpu"}).tensors[0].tolist() == [0, 1, 2, 3, 4]


def test_a_view_holds_the_send_open(peer):
    array = tensorwire.empty(LARGE, "uint8")
    array[:3] = 1, 2, 3
    with tensorwire.Listener() as listener:
        connect(peer, listener, view_for_a_while)
        with listener.accept(PATIENCE) as pipe:
            work = pipe.send(array, async_op=True)
            message = pipe.recv(PATIENCE)
            assert message.metadata == b"share"
            assert list(message.tensors[0]) == [1, 2, 3]
            assert not work.done()
            pipe.send()
            work.wait(PATIENCE)
            pipe.finish()


def test_works(peer):
    with tensorwire.Listener() as listener:
        connect(peer, listener, drop_all)
        with listener.accept(PATIENCE) as pipe:
            arrays = [np.full(100_000, number) for number in range(20)]
            works = [pipe.send(array, async_op=True) for array in arrays]

            async def wait():
                for work in works:
                    await work

            asyncio.run(wait())
            assert all(work.done() and work.name == "send" for work in works)
            with pytest.raises(tensorwire.PeerError, match="dropped the message without reading it"):
                pipe.send(arrays[0], delivered=True)


def test_the_end(peer, pipe):
    with pytest.raises(tensorwire.TimeoutError, match="receiving a message from the other end"):
        pipe.recv(0.05)
    pipe.finish()
    assert pipe.recv(PATIENCE) is None
    with pytest.raises(tensorwire.MisuseError, match="sends no more"):
        pipe.send()
    assert pipe.peer.pid == peer.pid
    assert f"process {peer.pid}" in repr(pipe)
    assert pipe.explain().startswith(f"pipe with the process that connected (host {pipe.peer.host}, pid {peer.pid})")
    pipe.close()
    pipe.close()
    with pytest.raises(tensorwire.MisuseError, match="was closed"):
        pipe.recv()


def test_a_peer_that_dies():
    with Peer() as peer, tensorwire.Listener() as listener:
        connect(peer, listener, drop_all)
        with listener.accept(PATIENCE) as pipe:
            timer = threading.Timer(0.1, peer.kill)
            timer.start()
            with pytest.raises(tensorwire.PeerDiedError, match=str(peer.pid)):
                pipe.recv(PATIENCE)
            with pytest.raises(tensorwire.PeerDiedError):
                pipe.send(np.ones(3))
            timer.join()


def test_listeners():
    with tensorwire.Listener() as listener:
        secret = listener.address.rsplit("/", 1)[1]
        assert len(secret) == 64
        assert secret not in repr(listener)
        with pytest.raises(tensorwire.TimeoutError, match="nobody has connected"):
            listener.accept(0.05)
        with pytest.raises(tensorwire.MisuseError, match="both ends of a pipe in one process"):
            tensorwire.Pipe.connect(listener.address, PATIENCE)
    with pytest.raises(tensorwire.MisuseError, match="closed"):
        listener.accept()
    with pytest.raises(tensorwire.MisuseError, match="TENSORWIRE_KEY"):
        tensorwire.Listener("tcp://127.0.0.1:0")
    with pytest.raises(tensorwire.MisuseError, match="is not the address of a pipe"):
        tensorwire.Pipe.connect("127.0.0.1:80")


def test_a_wait_holds_nobody_up(pipe):
    ticks = []

    def tick():
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            ticks.append(1)
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    with pytest.raises(tensorwire.TimeoutError):
        pipe.recv(0.3)
    thread.join()
    assert len(ticks) > 10


def test_ctrl_c():
    code = """
import os, signal, threading, tensorwire
listener = tensorwire.Listener()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    listener.accept(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert "interrupted" in run(code)[1]


def test_receives_that_are_started(pipe):
    first, second = [pipe.recv(async_op=True) for _ in range(2)]
    assert not first.done() and "in flight" in repr(first)
    with pytest.raises(tensorwire.TimeoutError):
        first.wait(0.01)
    pipe.send(np.ones(3), metadata=b"1", payloads=[b"abc"])
    pipe.send(np.zeros(LARGE), metadata=b"2")
    message = first.wait()
    assert (message.metadata, bytes(message.payloads[0])) == (b"1", b"abc")
    assert message.tensors[0].tolist() == [1, 1, 1] and first.wait() is message
    assert second.wait(PATIENCE).tensors[0].shape == (LARGE,)
    # One that is withdrawn, and one that is let go, lose nothing.
    third = pipe.recv(async_op=True)
    assert third.withdraw() and not third.withdraw()
    with pytest.raises(tensorwire.AbortedError):
        third.wait()
    fourth = pipe.recv(async_op=True)
    pipe.send(np.ones(2), metadata=b"3")
    while not fourth.done():
        time.sleep(0.001)
    del fourth
    gc.collect()
    assert pipe.recv(PATIENCE).metadata == b"3"
    with pytest.raises(tensorwire.MisuseError, match="async_op"):
        pipe.recv(into=[np.ones(3)], async_op=True)
    pipe.finish()
    assert pipe.recv(PATIENCE, async_op=True).wait() is None


def test_asyncio_loses_no_message(pipe):
    async def main():
        got, sends = [], []
        # Receives are cancelled at any moment while messages come.
        for number in range(200):
            sends.append(pipe.send(np.full(3 if number % 10 else LARGE // 8, number), async_op=True))
            waits = asyncio.ensure_future(receive(got))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
        while len(got) < 200:
            await receive(got)
        await asyncio.gather(*sends)
        assert got == list(range(200))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(receive(got), 0.05)
        await pipe.send(metadata=b"", async_op=True)
        assert (await pipe.recv(async_op=True)).tensors == []

    async def receive(got):
        message = await pipe.recv(PATIENCE, async_op=True)
        got.append(int(message.tensors[0][0]))

    asyncio.run(main())


def test_a_send_that_is_cancelled(peer):
    with tensorwire.Listener() as listener:
        connect(peer, listener, when_told, "cancelled")
        with listener.accept(PATIENCE) as pipe:

            async def main():
                # The other end does not read, so that it waits.
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(pipe.send(np.ones(LARGE), delivered=True, async_op=True), 0.1)
                work = pipe.send(np.ones(LARGE), async_op=True)
                assert not work.done() and work.withdraw() and not work.withdraw()
                with pytest.raises(tensorwire.AbortedError):
                    await work
                done = pipe.send(metadata=b"small", async_op=True)
                await done
                assert not done.withdraw()

            asyncio.run(main())
            peer.call(tell, "cancelled")
            assert pipe.recv(PATIENCE).metadata == b"taken back, taken back, small"


def when_told(pipe, event):
    KEPT[event] = told = threading.Event()
    told.wait(PATIENCE)
    got = []
    while b"small" not in got:
        incoming = pipe.next()
        try:
            got.append(incoming.read().metadata)
        except tensorwire.PeerError as error:
            assert "taken the message back" in str(error)
            got.append(b"taken back")
    pipe.send(metadata=b", ".join(got))
    del KEPT[event]


def tell(event):
    from lease_peer import until

    until(lambda: event in KEPT)
    KEPT[event].set()


def test_the_program_of_the_docs(tmp_path):
    ((_, text),) = [block for block in pages.blocks("pipes.md") if block[0] == "python"]
    (tmp_path / "weights.py").write_text(text)
    pages.add_commands(tmp_path)
    said = pages.run(tmp_path, "python weights.py", shell=True)
    assert said is None or "layer 3 1000000.0" in said


def test_a_tensor_of_torch(pipe):
    torch = pytest.importorskip("torch")
    matrix = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    large = tensorwire.torch.empty(LARGE, dtype=torch.bfloat16).fill_(3)
    sent = [matrix, matrix.T, matrix[1:3, 2], large, torch.zeros(0, 3), torch.tensor(5), matrix.expand(2, 4, 6)]
    message = there_and_back(pipe, *sent)
    for got, wanted in zip(message.tensors, sent):
        assert isinstance(got, torch.Tensor)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got, wanted)
    place = torch.zeros(6, 4)
    pipe.send(matrix.T, np.ones(2))
    message = pipe.recv(PATIENCE, into={0: place})
    assert message.tensors[0] is place
    assert torch.equal(place, matrix.T)
    assert isinstance(message.tensors[1], np.ndarray)
    assert isinstance(message, Message)
    parameter = torch.nn.Parameter(matrix)
    assert torch.equal(there_and_back(pipe, parameter.detach()).tensors[0], matrix)
