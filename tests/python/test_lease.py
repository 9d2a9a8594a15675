"""NumPy arrays of other processes: the same memory, whatever the layout, until the last one lets go of it."""

import gc
import os
import pickle
import signal
import subprocess
import sys
import traceback
import weakref
from pathlib import Path

import pytest

import tensorwire
from lease_peer import Peer, drop, fds, keep, listed, onward, resident, run, until, write

np = pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def peer():
    with Peer() as peer:
        yield peer


@pytest.fixture
def array():
    array = tensorwire.empty((4, 6), "int64")
    array[:] = np.arange(24).reshape(4, 6)
    return array


def waiting():
    """Grants that are not over. What was released is noticed first."""
    tensorwire.collect()
    return tensorwire.lease_stats()["granted"]


LAYOUTS = {
    "whole": lambda array: array,
    "row": lambda array: array[2],
    "column": lambda array: array[:, 3],
    "transposed": lambda array: array.T,
    "backwards": lambda array: array[::-1, ::-2],
    "one element": lambda array: array[1, 2:3],
    "0-dim": lambda array: array[1, 2, ...],
    "no elements": lambda array: array[:, 6:],
    "no rows": lambda array: array[:0],
    "repeated": lambda array: np.broadcast_to(array[0], (3, 6)),
    "windows": lambda array: np.lib.stride_tricks.sliding_window_view(array, 3, axis=1),
    "other type": lambda array: array.view("float32"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(peer, array, layout):
    view = layout(array)
    lease = tensorwire.share(view)
    peer.call(keep, "it", pickle.loads(pickle.dumps(lease)))
    assert peer.call(listed, "it") == view.tolist()
    assert lease.holders() == ([peer.pid] if view.size else []), "an array without elements holds nothing"
    array += 1
    assert peer.call(listed, "it") == view.tolist()
    peer.call(drop, "it")
    lease.wait(50)
    assert lease.holders() == []


TYPES = "bool int8 uint16 >i4 float16 float64 complex64 complex128 datetime64[ns] S5 U3".split() + [
    [("a", "<i4"), ("b", "<f8", (2,))],
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types(dtype):
    array = tensorwire.empty((2, 3), dtype)
    opened = tensorwire.open(pickle.loads(pickle.dumps(tensorwire.share(array))))
    assert (opened.dtype, opened.shape, opened.strides) == (array.dtype, array.shape, array.strides)


def test_types_of_an_extension():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = tensorwire.empty(3, ml_dtypes.bfloat16)
    array[:] = [1, 2, 3]
    opened = tensorwire.open(tensorwire.share(array))
    assert opened.dtype == array.dtype and opened.tolist() == [1, 2, 3]


def test_what_is_written_there_is_seen_here(peer, array):
    lease = tensorwire.share(array)
    peer.call(keep, "it", lease)
    peer.call(write, "it", (3, 5), -7)
    assert array[3, 5] == -7
    peer.call(drop, "it")


def test_read_only_stays_read_only(array):
    array.flags.writeable = False
    opened = tensorwire.open(tensorwire.share(array))
    with pytest.raises(ValueError, match="read-only"):
        opened[0, 0] = 1


def test_views_of_one_array_keep_sharing(peer, array):
    peer.call(keep, "whole", tensorwire.share(array))
    peer.call(keep, "part", tensorwire.share(array[1:3, 1:3]))
    peer.call(write, "whole", (1, 1), 99)
    assert peer.call(listed, "part")[0][0] == 99
    peer.call(drop, "whole", "part")


def test_memory_outlives_array_and_token_here(peer):
    before = waiting()
    array = tensorwire.empty(1000, "int32")
    array[:] = 5
    lease = tensorwire.share(array)
    sent = pickle.dumps(lease)
    del array, lease
    assert waiting() == before + 1
    peer.call(keep, "it", pickle.loads(sent))
    assert peer.call(listed, "it") == [5] * 1000
    peer.call(drop, "it")
    until(lambda: waiting() == before)


def test_several_uses(peer, array):
    before = waiting()
    lease = tensorwire.share(array, uses=2)
    again = pickle.loads(pickle.dumps(lease))
    peer.call(keep, "one", lease)
    del lease
    peer.call(drop, "one")
    peer.call(keep, "two", again)
    assert waiting() == before + 1
    peer.call(drop, "two")
    until(lambda: waiting() == before)
    with pytest.raises(tensorwire.PeerError, match="over") as raised:
        peer.call(keep, "three", again)
    assert raised.value.kind == "refused"


def test_in_one_process(array):
    first, second = tensorwire.share(array[:2]), tensorwire.share(array[2:])
    opened = [tensorwire.open(token) for token in (pickle.loads(pickle.dumps(first)), second)]
    assert [part.tolist() for part in opened] == [array[:2].tolist(), array[2:].tolist()]
    opened[0][0, 0] = 1234
    assert array[0, 0] == 1234
    assert first.holders() == [os.getpid()]
    opened.clear()
    first.wait(50)


def test_onward_outlives_the_middle(peer, array):
    """A lends to B, which lends to C and lets go: A's memory is held until C lets go of it."""
    with Peer() as third:
        lease = tensorwire.share(array[1:])
        peer.call(keep, "it", lease)
        third.call(keep, "theirs", peer.call(onward, "it"))
        assert third.call(listed, "theirs") == array[1:].tolist()
        peer.call(drop, "it", "token it")
        assert lease.holders() == [peer.pid]
        array[1, 0] = -1
        assert third.call(listed, "theirs")[0][0] == -1
        with pytest.raises(TimeoutError, match=f"process {peer.pid} holds it"):
            lease.wait(0.2)
        third.call(drop, "theirs")
        lease.wait(50)


def test_an_opened_array_is_shared_memory(array):
    """What arrived can be found by its address: parts of it too, also beside the memory that it is a part of."""
    opened = tensorwire.open(tensorwire.share(array[1:3]))
    again = tensorwire.open(tensorwire.share(opened[1]))
    whole = tensorwire.open(tensorwire.share(array))
    again[0] = -5
    assert whole[2, 0] == -5


def test_holder_dies(array):
    with Peer() as victim:
        lease = tensorwire.share(array)
        victim.call(keep, "it", lease)
        assert lease.holders() == [victim.pid]
        victim.kill()
        lease.wait(50)
        assert lease.holders() == []


def test_owner_dies():
    with Peer() as owner:
        token, other = owner.call(_two_tokens)
        opened = tensorwire.open(token)
        owner.kill()
        assert opened.tolist() == [3, 3, 3]
        opened[0] = 4
        with pytest.raises(tensorwire.PeerDiedError, match="stay valid|has ended"):
            tensorwire.open(other)


def _two_tokens():
    array = tensorwire.empty(3, "int64")
    array[:] = 3
    return tensorwire.share(array), tensorwire.share(array)


LOST = """
import tensorwire, time
array = tensorwire.empty(1000, "uint8")
token = tensorwire.share(array, lifetime=0.2).token.to_bytes()
del array
end = time.monotonic() + 60
while tensorwire.lease_stats()["granted"] and time.monotonic() < end:
    time.sleep(0.01)
stats = tensorwire.lease_stats()
assert (stats["granted"], stats["expired"], stats["expired_bytes"]) == (0, 1, 1000), stats
try:
    tensorwire.open(tensorwire.Token(token))
except tensorwire.PeerError as error:
    print("refused:", error)
"""


def test_lost_message_expires_with_a_warning():
    code, said = run(LOST)
    assert code == 0 and "a token of 1000 bytes has expired" in said and "refused:" in said, said


def test_renewed_token_lives_longer(array):
    lease, lifetime = None, 0.05
    while lease is None:
        lease = tensorwire.share(array, lifetime=lifetime)
        try:
            lease.renew(None)
        except tensorwire.MisuseError:
            # It has expired before this process came so far.
            lease, lifetime = None, lifetime * 2
    expired = tensorwire.lease_stats()["expired"]
    # It would have expired before its twin.
    twin = tensorwire.share(array, lifetime=lifetime)
    until(lambda: tensorwire.lease_stats()["expired"] > expired)
    assert tensorwire.open(lease)[0, 1] == array[0, 1]
    with pytest.raises(tensorwire.PeerError, match="expired"):
        tensorwire.open(twin)
    with pytest.raises(tensorwire.MisuseError, match="expired"):
        twin.renew(10)


def test_discarded_token_is_not_waited_for(array):
    lease = tensorwire.share(array)
    tensorwire.Token(lease.token.to_bytes()).discard()
    lease.wait(10)
    del lease
    assert waiting() == 0


LEFT = """
import multiprocessing.util, subprocess, sys
import tensorwire
array = tensorwire.empty(1000, "uint8")
lease = tensorwire.share(array)
mine = tensorwire.open(tensorwire.share(array))
lost = tensorwire.share(array).token.to_bytes()
# Not a child of multiprocessing, which would be waited for, or ended, before anything is said.
hold = "import tensorwire; it = tensorwire.open(tensorwire.Token(bytes.fromhex(input()))); print(flush=True); input()"
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
peer = subprocess.Popen([sys.executable, "-c", hold], **pipes)
print(lease.token.to_bytes().hex(), file=peer.stdin, flush=True)
peer.stdout.readline()
print("peer", peer.pid)
"""


def test_message_at_exit_names_who_holds_what(tmp_path):
    (tmp_path / "left.py").write_text(LEFT)
    code, said = run(f"import runpy; runpy.run_path({str(tmp_path / 'left.py')!r}, run_name='__main__')")
    peer = said.partition("peer ")[2].split()[0]
    assert code == 0 and f"1000 bytes are held by process {peer};" in said, said
    assert "tokens sent and not redeemed: 1 (1000 bytes)" in said, said


def test_message_at_exit_of_what_nobody_holds():
    code, said = run("import tensorwire; lost = tensorwire.share(tensorwire.empty(3, 'uint8')).token.to_bytes()")
    assert code == 0 and "1 of 1 grants are outstanding: tokens sent and not redeemed: 1 (3 bytes)" in said, said


def test_nothing_is_said_at_exit_when_nothing_is_left():
    code, said = run("import tensorwire; a = tensorwire.empty(3); b = tensorwire.open(tensorwire.share(a))")
    assert (code, said) == (0, "")


def test_damaged_tokens_are_refused(array):
    data = bytearray(tensorwire.share(array).token.to_bytes())
    data[60] ^= 1
    for wrong, text in [(bytes(data), "damaged"), (b"", "not a token"), (bytes(data[:100]), "damaged")]:
        with pytest.raises(tensorwire.MisuseError, match=text):
            tensorwire.Token(wrong)
    with pytest.raises(tensorwire.MisuseError, match="not a bytes"):
        tensorwire.open(bytes(data))


NOTES = {
    "none": b"",
    "short": b"\x01\x00\x00\x01\x03\x00<f4",
    "longer": tensorwire.lease.Layout(0, 0, "<f4", (2,), (4,), 0).write() + b"x",
    "newer": b"\x09" + tensorwire.lease.Layout(0, 0, "<f4", (2,), (4,), 0).write()[1:],
    "another kind": tensorwire.lease.Layout(7, 0, "<f4", (2,), (4,), 0).write(),
    "too long": tensorwire.lease.Layout(0, 0, "<f4", (5,), (4,), 0).write(),
    "last element": tensorwire.lease.Layout(0, 0, "<f8", (3,), (7,), 0).write(),
    "before": tensorwire.lease.Layout(0, 0, "<f4", (2,), (-4,), 0).write(),
    "negative size": tensorwire.lease.Layout(0, 0, "<f4", (-1,), (4,), 0).write(),
    "overflow": tensorwire.lease.Layout(0, 0, "<f4", (2**62, 2**62), (2**62, 2**62), 0).write(),
    "objects": tensorwire.lease.Layout(0, 0, "|O", (1,), (8,), 0).write(),
    "no type": tensorwire.lease.Layout(0, 0, "f99", (1,), (8,), 0).write(),
    "a program": tensorwire.lease.Layout(0, 0, "[__import__('os')]", (1,), (8,), 0).write(),
}


@pytest.mark.parametrize("note", NOTES.values(), ids=NOTES)
def test_wrong_notes_are_refused(note):
    memory = tensorwire.empty(16, "uint8")
    address = memory.__array_interface__["data"][0]
    lease = tensorwire._native.share(address, 16, None, note=note)
    with pytest.raises((tensorwire.MisuseError, tensorwire.UnsupportedError)):
        tensorwire.open(lease)
    assert lease.holders() == []


def test_pickled_lease_is_its_token(array):
    lease = tensorwire.share(array)
    token = pickle.loads(pickle.dumps(lease))
    assert type(token) is tensorwire.Token and token.to_bytes() == lease.token.to_bytes()
    assert (token.nbytes, token.device, token.pid) == (array.nbytes, "cpu", os.getpid())
    assert (lease.nbytes, lease.device) == (array.nbytes, "cpu")
    assert pickle.loads(pickle.dumps(token)).to_bytes() == token.to_bytes()
    assert tensorwire.open(token).tolist() == tensorwire.open(lease).tolist() == array.tolist()


def test_only_the_lender_asks_about_holders():
    code, said = run("""
import os, tensorwire
lease = tensorwire.share(tensorwire.empty(3), uses=0)
lender = os.getpid()
if (child := os.fork()) == 0:
    refused = 0
    for ask in (lease.holders, lease.wait, lease.reclaim, lambda: lease.renew(1)):
        try:
            ask()
        except tensorwire.MisuseError as error:
            refused += f"process {lender}" in str(error)
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
lease.reclaim(60)
""")
    assert code == 0, said


def test_reclaimed_memory_is_ours_again(peer, array):
    lease = tensorwire.share(array)
    peer.call(keep, "it", lease)
    with pytest.raises(TimeoutError, match=str(peer.pid)):
        lease.reclaim(0.2)
    peer.call(drop, "it")
    lease.reclaim(50)
    assert lease.holders() == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(array):
    code, said = run(FOREIGN, TOKEN=tensorwire.share(array).token.to_bytes().hex())
    assert code == 0 and "refused:" in said, said


FOREIGN = """
import os, numpy, tensorwire
token = tensorwire.Token(bytes.fromhex(os.environ["TOKEN"]))
os.setgroups([]); os.setgid(12345); os.setuid(12345)
try:
    tensorwire.open(token, timeout=20)
except tensorwire.PeerError as error:
    print("refused:", error)
"""


def test_ordinary_memory_is_refused_or_copied(caplog):
    ordinary = np.arange(6.0).reshape(2, 3).T
    with pytest.raises(tensorwire.UnsupportedError, match=r"tensorwire\.empty\(\).*copy=True"):
        tensorwire.share(ordinary)
    before = tensorwire.lease_stats()["copied_bytes"]
    with caplog.at_level("INFO", "tensorwire"):
        opened = tensorwire.open(tensorwire.share(ordinary, copy=True))
    assert opened.tolist() == ordinary.tolist()
    assert "copies 48 bytes" in caplog.text
    assert tensorwire.lease_stats()["copied_bytes"] == before + 48
    shared = tensorwire.empty(3)
    tensorwire.share(shared, copy=True)
    assert tensorwire.lease_stats()["copied_bytes"] == before + 48, "memory that can be shared is not copied"


@pytest.mark.parametrize(
    "wrong", [3, "text", bytearray(4), np.array([object()]), np.ma.masked_array([1, 2], [0, 1])], ids=str
)
def test_what_is_no_tensor_is_refused(wrong):
    with pytest.raises(tensorwire.MisuseError):
        tensorwire.share(wrong)


def test_sharing_imports_nothing():
    """A child that is forked while another thread imports waits for that import for ever."""
    program = (
        "import sys, numpy, tensorwire; array = tensorwire.empty(3); before = set(sys.modules)\n"
        "tensorwire.share(array); print(set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "terms", [{"uses": -1}, {"uses": 70000}, {"uses": 1.5}, {"lifetime": -1}, {"lifetime": float("nan")}]
)
def test_wrong_terms_are_refused(array, terms):
    with pytest.raises(tensorwire.MisuseError):
        tensorwire.share(array, **terms)


def test_collect(array):
    assert tensorwire.collect() >= 0
    lease = tensorwire.share(array, uses=0)
    del lease
    assert tensorwire.collect() == 0


def _open_and_drop(sent):
    before = fds(), resident()
    for data in sent:
        tensorwire.open(tensorwire.Token(data))
    gc.collect()
    return before, (fds(), resident())


def test_ten_thousand_sends_at_constant_cost(peer):
    array = tensorwire.empty(1 << 20, "uint8")
    sends = lambda count: [tensorwire.share(array).token.to_bytes() for _ in range(count)]  # noqa: E731
    peer.call(_open_and_drop, sends(500))
    begin, granted = (fds(), resident()), waiting()
    for _ in range(20):
        (their_fds, their_bytes), (fds_then, bytes_then) = peer.call(_open_and_drop, sends(500))
        assert fds_then <= their_fds + 1
        assert bytes_then - their_bytes < 8 << 20
    until(lambda: waiting() == granted)
    assert fds() <= begin[0] + 1
    assert resident() - begin[1] < 16 << 20


def test_ctrl_c_ends_waits(array):
    code, said = run(INTERRUPTED)
    assert code == 0 and "interrupted" in said, said


INTERRUPTED = """
import os, signal, threading, tensorwire
lease = tensorwire.share(tensorwire.empty(3))
try:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    lease.wait(60)
except KeyboardInterrupt:
    print("interrupted")
tensorwire.open(lease)
"""


def test_stopped_owner_is_a_time_out():
    with Peer() as owner:
        token = owner.call(_two_tokens)[0]
        os.kill(owner.pid, signal.SIGSTOP)
        until(lambda: "(stopped)" in Path(f"/proc/{owner.pid}/status").read_text())
        try:
            with pytest.raises(TimeoutError, match="stopped"):
                tensorwire.open(token, timeout=0.3)
        finally:
            os.kill(owner.pid, signal.SIGCONT)
        assert tensorwire.open(token).tolist() == [3, 3, 3]


def test_forked_child_leaves_leases_alone(array):
    lease = tensorwire.share(array)
    opened = tensorwire.open(lease)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(tensorwire.MisuseError):
                lease.holders()
            del opened
            with pytest.raises(tensorwire.UnsupportedError, match="parent"):
                tensorwire.share(array)
            array = tensorwire.empty(3)
            mine = tensorwire.open(tensorwire.share(array))
            mine[:] = 3
            code = 0 if array.tolist() == [3, 3, 3] else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert lease.holders() == [os.getpid()]


def test_memory_is_let_go_with_the_last_view(array):
    lease = tensorwire.share(array)
    view = tensorwire.open(lease)[1:, 2]
    gone = weakref.ref(view)
    assert lease.holders() == [os.getpid()]
    del view
    assert gone() is None
    lease.wait(50)
