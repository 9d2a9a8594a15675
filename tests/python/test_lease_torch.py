"""torch tensors of other processes, by share() and open(), and through torch.multiprocessing."""

import multiprocessing
import os
import pickle
import queue as _queue
import signal
import subprocess
import sys
import time
from itertools import islice
from multiprocessing.reduction import ForkingPickler

import pytest

import tensorwire
from lease_peer import KEPT, PATIENCE, Peer, drop, keep, listed, run, thread_names, until, write

torch = pytest.importorskip("torch")

import torch.multiprocessing as mp  # noqa: E402

import tensorwire.torch as tw  # noqa: E402


@pytest.fixture(scope="module")
def peer():
    with Peer() as peer:
        yield peer


@pytest.fixture
def tensor():
    return tw.full((4, 6), 1.5)


@pytest.fixture(params=[tw.full, torch.full], ids=["ours", "torch's"])
def sent(request):
    """A tensor in memory of tensorwire, and one in ordinary memory, which torch moves when it is sent."""
    return request.param((4, 6), 1.5)


@pytest.fixture
def reductions():
    holders = tensorwire.lease_stats()["holders"]
    tw.install_reductions()
    yield
    tw.uninstall_reductions()
    # A thread notices the end of a process. What it held counts until then, and the next test must not count it.
    until(lambda: tensorwire.lease_stats()["holders"] <= holders)


def again(token):
    return tensorwire.open(pickle.loads(pickle.dumps(token)))


DTYPES = [
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
]


@pytest.mark.parametrize("dtype", sorted(set(DTYPES), key=str), ids=str)
def test_dtypes(dtype):
    shared = tw.empty(24 * 4, dtype=torch.uint8)
    shared[:] = 1
    try:
        tensor = shared.view(dtype)[:6].view(2, 3)
    except RuntimeError as error:
        pytest.skip(f"torch: {error}")
    opened = again(tensorwire.share(tensor))
    assert (opened.dtype, opened.shape, opened.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert bytes(opened.untyped_storage()) == bytes(tensor.untyped_storage())[: 6 * dtype.itemsize]
    assert opened.data_ptr() == tensor.data_ptr()


LAYOUTS = {
    "whole": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t(),
    "column": lambda tensor: tensor[:, 2],
    "steps": lambda tensor: tensor[::2, 1::3],
    "0-dim": lambda tensor: tensor[1, 1],
    "expanded": lambda tensor: tensor[0].expand(3, 6),
    "empty": lambda tensor: tensor[:, 6:],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(peer, tensor, layout):
    tensor.copy_(torch.arange(24.0).view(4, 6))
    view = layout(tensor)
    lease = tensorwire.share(view)
    peer.call(keep, "it", lease)
    assert peer.call(listed, "it") == view.tolist()
    opened = again(tensorwire.share(view))
    assert (opened.stride(), opened.shape) == (view.stride(), view.shape)
    peer.call(drop, "it")
    lease.wait(50)


def test_gradients(tensor):
    leaf = tensor.requires_grad_()
    opened = again(tensorwire.share(leaf))
    assert opened.requires_grad and opened.is_leaf
    with pytest.raises(tensorwire.MisuseError, match=r"detach\(\)"):
        tensorwire.share(leaf * 2)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters(tensor, requires_grad):
    opened = again(tensorwire.share(torch.nn.Parameter(tensor, requires_grad=requires_grad)))
    assert type(opened) is torch.nn.Parameter and opened.requires_grad is requires_grad
    assert opened.tolist() == tensor.tolist()


def test_views_that_stand_for_other_values():
    numbers = tw.empty(3, dtype=torch.complex64)
    numbers.copy_(torch.tensor([1 + 2j, 3j, 4]))
    for view in (numbers.conj(), numbers.conj().imag):
        with pytest.raises(tensorwire.MisuseError, match="resolve_"):
            tensorwire.share(view)
        assert again(tensorwire.share(view, copy=True)).tolist() == view.tolist()


def test_other_layouts_are_refused():
    for wrong in (torch.eye(3).to_sparse(), torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)):
        with pytest.raises(tensorwire.MisuseError):
            tensorwire.share(wrong)
    with pytest.raises(tensorwire.UnsupportedError, match="meta"):
        tensorwire.share(torch.empty(3, device="meta"))


def test_ordinary_memory_is_refused_or_copied():
    ordinary = torch.arange(6.0).view(2, 3).t()
    with pytest.raises(tensorwire.UnsupportedError, match="copy=True"):
        tensorwire.share(ordinary)
    opened = again(tensorwire.share(ordinary, copy=True))
    assert opened.tolist() == ordinary.tolist() and opened.stride() == ordinary.stride()


def test_opened_tensors_are_shared_memory_for_collectives(tensor, tmp_path):
    opened = again(tensorwire.share(tensor))
    group = tensorwire.Group.from_url(f"file://{tmp_path}/meet", rank=0, world=1, timeout=30)
    group.all_reduce(opened)
    group.close()
    assert tensorwire.open(tensorwire.share(opened[1:])).data_ptr() == opened[1:].data_ptr()


# Through torch.multiprocessing.


def _child(theirs, ours):
    """Answers what it gets: sums, or the tensors themselves."""
    while (order := theirs.get(timeout=PATIENCE)) is not None:
        what, value = order
        if what == "sum":
            ours.put(float(value.sum()))
        elif what == "add":
            value += 1
            ours.put("done")
        elif what == "keep":
            KEPT["it"] = value
            ours.put("kept")
        elif what == "drop":
            KEPT.clear()
            ours.put("dropped")
        elif what == "alias":
            value[0].fill_(7)
            ours.put(value[1].tolist())
        elif what == "type":
            ours.put((type(value).__name__, value.requires_grad, value.is_leaf, tuple(value.shape)))
        elif what == "kept":
            ours.put(sum(float(tensor.sum()) for tensor in KEPT["it"]))
        elif what == "model":
            with torch.no_grad():
                value.weight += 1
            ours.put("done")
        elif what == "storage":
            ours.put(len(value))
        elif what == "load":
            try:
                ours.put(f"got {ForkingPickler.loads(value)}")
            except tensorwire.PeerError as error:
                ours.put(str(error))
        elif what == "onward":
            tw.install_reductions()
            ours.put(value)
        del order, value


@pytest.fixture
def child(reductions):
    spawn = mp.get_context("spawn")
    theirs, ours = spawn.Queue(), spawn.Queue()
    process = spawn.Process(target=_child, args=(theirs, ours))
    process.start()

    def ask(what, value):
        theirs.put((what, value))
        return ours.get(timeout=PATIENCE)

    ask.process = process
    yield ask
    if process.is_alive():
        theirs.put(None)
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()


def granted():
    tensorwire.collect()
    return tensorwire.lease_stats()["granted"]


def test_queue(child, sent):
    before = granted()
    assert child("sum", sent) == 36
    assert child("add", sent) == "done"
    assert sent[0, 0] == 2.5, "the same memory"
    until(lambda: granted() == before)
    assert child("sum", torch.empty(0)) == 0
    assert child("sum", sent.to_sparse()) == 60


def test_queue_keeps_what_tensors_are(child, sent):
    assert child("type", sent.detach().requires_grad_()) == ("Tensor", True, True, (4, 6))
    assert child("type", torch.nn.Parameter(sent)) == ("Parameter", True, True, (4, 6))
    assert child("type", torch.nn.Parameter(sent, requires_grad=False)) == ("Parameter", False, True, (4, 6))
    assert child("type", sent[:, 6:]) == ("Tensor", False, True, (4, 0))


def test_views_in_one_message_keep_sharing(child, sent):
    assert child("alias", (sent[1], sent[:2, :2])) == [[1.5, 1.5], [7, 7]]
    assert sent[1].tolist() == [7] * 6


def test_message_of_a_dead_child_is_let_go(child, tensor):
    before = granted()
    assert child("keep", tensor) == "kept"
    assert granted() == before + 1
    child.process.kill()
    until(lambda: granted() == before)


def test_onward_and_back(child, sent):
    """torch refuses to send what was received."""
    back = child("onward", sent)
    back[0, 0] = 77
    assert sent[0, 0] == 77 and back.data_ptr() == sent.data_ptr()


def test_put_and_get_in_one_process(reductions, sent):
    queue = mp.get_context("spawn").Queue()
    queue.put(sent)
    got = queue.get(timeout=PATIENCE)
    got[0, 0] = 4
    assert sent[0, 0] == 4
    queue.close()


def _argument(tensor, line):
    tensor += 1
    line.send(tensor)
    line.recv()


def test_arguments_and_pipes(reductions, sent):
    ours, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(target=_argument, args=(sent, theirs))
    process.start()
    assert ours.poll(PATIENCE)
    got = ours.recv()
    assert got[0, 0] == 2.5 == sent[0, 0]
    ours.send("enough")
    process.join(PATIENCE)
    assert process.exitcode == 0


def test_ipc_collect_collects_ours(reductions, monkeypatch):
    collected = []
    monkeypatch.setattr("tensorwire.lease.collect", lambda: collected.append(1))
    monkeypatch.setattr(torch._C, "_cuda_ipc_collect", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    torch.cuda.ipc_collect()
    assert collected == [1]


def test_uninstalled_is_as_before():
    def now():
        return torch.cuda.ipc_collect, multiprocessing.queues.Queue.put, dict(ForkingPickler._extra_reducers)

    before = now()
    tw.install_reductions()
    tw.install_reductions()
    assert all(one != other for one, other in zip(now(), before))
    tw.uninstall_reductions()
    tw.uninstall_reductions()
    assert now() == before
    assert b"tensorwire" not in bytes(ForkingPickler.dumps(torch.ones(2)))


def test_message_as_bytes(reductions, sent):
    data = bytes(ForkingPickler.dumps(sent))
    assert b"tensorwire" in data and len(data) < 1000
    assert ForkingPickler.loads(data).data_ptr() == sent.data_ptr()


# Ordinary memory, which torch moves into a file when it is sent.


def test_ordinary_memory_is_moved_in_place(child):
    base = torch.zeros(4, 6)
    view = base[1:3, ::2]
    before = granted()
    assert child("add", view) == "done"
    assert base.sum() == 6 and base.is_shared() and view.is_shared()
    until(lambda: granted() == before)


def test_the_receiver_keeps_what_its_sender_has_dropped(child):
    """The sender has no descriptor and no memory of it: a worker that has sent much can go on."""
    child("sum", torch.ones(1))
    before, open_before = granted(), listed_fds("self")
    tensors = [torch.full((10,), float(value)) for value in range(100)]
    assert child("keep", tensors) == "kept"
    until(lambda: granted() == before)
    del tensors
    until(lambda: listed_fds("self") <= open_before + 2)
    assert child("kept", None) == sum(range(100)) * 10
    assert child("drop", None) == "dropped"


def test_memory_that_torch_has_shared_before(child):
    numbers = torch.ones(100).share_memory_()
    address = numbers.data_ptr()
    assert child("add", numbers) == "done"
    assert numbers.sum() == 200 and numbers.data_ptr() == address


def test_models_and_storages(child):
    model = torch.nn.Linear(3, 2)
    weight = model.weight.detach().clone()
    assert child("model", model) == "done"
    assert torch.equal(model.weight, weight + 1), "the same memory"
    assert child("sum", torch.ones(3).to_sparse()) == 3
    storage = torch.ones(5).untyped_storage()
    assert child("storage", storage) == 20
    assert child("storage", torch.UntypedStorage(0)) == 0


def test_sent_a_thousand_times(child):
    numbers, before = torch.ones(1000), granted()
    for _ in range(20):
        child("sum", numbers)
    ours, theirs = listed_fds("self"), listed_fds(child.process.pid)
    for _ in range(1000):
        assert child("sum", numbers) == 1000
    until(lambda: granted() == before)
    # What is let go is closed by a thread, a moment later.
    until(lambda: listed_fds("self") <= ours + 2 and listed_fds(child.process.pid) <= theirs + 2)


def test_many_are_let_go_at_once(child):
    """They are dropped by a thread that needs the interpreter; one is enough."""

    before = granted()
    assert child("keep", [torch.zeros(1) for _ in range(300)]) == "kept"
    assert child("drop", None) == "dropped"
    until(lambda: granted() == before)
    assert thread_names().count("tensorwire-done") < 20


PROGRAM = """
import time
import torch, torch.multiprocessing as mp
import tensorwire.torch
tensorwire.torch.install_reductions()
fork = mp.get_context("fork")
queue, heard = fork.SimpleQueue(), fork.SimpleQueue()
def child():
    got = queue.get()
    heard.put(1)
    time.sleep(0.5)
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("fork.Process(target=child).start(); queue.put(torch.ones(3)); heard.get()", ""),
        ("fork.Process(target=child).start(); queue.put(torch.ones(3))", ""),
        ("queue.put(torch.ones(3))", "tokens sent and not redeemed: 1 (12 bytes)"),
    ],
    ids=["held", "not yet received", "lost"],
)
def test_end_of_a_program(ending, said):
    """multiprocessing waits for children when the program ends: only then it is known what is lost."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + ending], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert said in done.stderr if said else not done.stderr


def test_lost_messages_leave_nothing_open(reductions):
    """A process that dies before it reads its messages: torch keeps a descriptor for each for ever."""
    spawn = mp.get_context("spawn")
    queue = spawn.SimpleQueue()
    process = spawn.Process(target=_get_one, args=(queue,))
    process.start()
    queue.put(torch.ones(10))
    process.join(PATIENCE)
    before = listed_fds("self")
    for value in range(20):
        queue.put(torch.full((10,), float(value)))
    # Whoever reads what nobody wanted may throw it away.
    while not queue.empty():
        queue.get()
    until(lambda: listed_fds("self") <= before)


@pytest.mark.parametrize("make", [tw.full, torch.full], ids=["ours", "torch's"])
def test_messages_of_a_dead_reader_come_back(reductions, make):
    """A reader that is killed: what was put for it is never received, and comes back when its time is over."""
    spawn = mp.get_context("spawn")
    queue, before = spawn.SimpleQueue(), granted()
    process = spawn.Process(target=_get_one, args=(queue,))
    process.start()
    queue.put(make((10,), 1.0))
    process.join(PATIENCE)
    until(lambda: granted() == before)
    process = spawn.Process(target=_get_nothing, args=(queue,))
    process.start()
    queue.put(make((10,), 2.0))
    assert granted() == before + 1, "without a lifetime it is kept"
    tw.install_reductions(lifetime=0.2)
    expired = tensorwire.lease_stats()["expired"]
    for value in range(3):
        queue.put(make((10,), float(value)))
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)
    until(lambda: granted() == before + 1)
    assert tensorwire.lease_stats()["expired"] == expired + 3
    # The one without a lifetime can still be read; the others are refused.
    assert queue.get().tolist() == [2.0] * 10
    for _ in range(3):
        with pytest.raises(tensorwire.TensorwireError, match="expired|not here"):
            queue.get()
    until(lambda: granted() == before)


def test_a_message_that_has_expired_is_refused_by_who_has_its_memory(child, sent):
    """The receiver has the tensor, by this process or by an earlier message: what came too late is an error all the same.
    It cannot know that it is the same file: the numbers of one that is gone are given to others."""
    assert child("keep", sent) == "kept"
    before = granted()
    tw.install_reductions(lifetime=0)
    data = bytes(ForkingPickler.dumps(sent))
    until(lambda: granted() == before)
    with pytest.raises(tensorwire.PeerError, match="expired"):
        ForkingPickler.loads(data)
    assert "expired" in child("load", data)
    assert child("drop", None) == "dropped"


def test_warning_at_the_end_says_what_to_do_about_lost_messages():
    send = "import torch.multiprocessing as mp, tensorwire.torch as tw; tw.install_reductions({}); "
    send += "queue = mp.get_context('spawn').SimpleQueue(); queue.put(tw.full((10,), 1.0))"
    code, said = run(send.format(""))
    assert code == 0 and "not redeemed: 1 (40 bytes); a reader that died" in said, said
    assert "install_reductions(lifetime=SECONDS)" in said, said
    code, said = run(send.format("lifetime=600"))
    assert code == 0 and "not redeemed: 1 (40 bytes)" in said and "lifetime=" not in said, said


@pytest.mark.parametrize("lifetime", [-1, float("nan")])
def test_lifetimes_that_are_none(reductions, lifetime):
    with pytest.raises(tensorwire.MisuseError, match="lifetime="):
        tw.install_reductions(lifetime=lifetime)


def _get_nothing(queue):
    time.sleep(PATIENCE)


def _get_one(queue):
    queue.get()


def listed_fds(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader(reductions, method, capfd):
    loader = torch.utils.data.DataLoader(
        Squares(),
        batch_size=8,
        num_workers=2,
        multiprocessing_context=method,
        timeout=PATIENCE,
        worker_init_fn=_install,
    )
    # The first time, it is left while its workers have more.
    for count in (1, 10):
        batches = list(islice(loader, count))
        assert [batch.tolist() for batch in batches] == [
            [float(n * n) for n in range(first, first + 8)] for first in range(0, 8 * count, 8)
        ]
        assert all(batch.is_shared() for batch in batches)
    assert "outstanding" not in capfd.readouterr().err, "workers end as they always do"


def _install(*_):
    """Workers that are spawned do not inherit it."""
    tw.install_reductions()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pool(reductions, sent, method):
    with mp.get_context(method).Pool(2, initializer=_install) as pool:
        for result in pool.map_async(_doubled, [sent] * 6).get(PATIENCE):
            assert torch.equal(result, torch.full((4, 6), 3.0))
    assert (sent == 1.5).all()


def _doubled(tensor):
    return tensor * 2


@pytest.mark.parametrize("make", [tw.full, torch.full], ids=["ours", "torch's"])
def test_manager(reductions, make):
    """A third process keeps the tensor: what its maker has dropped stays."""
    with mp.get_context("spawn").Manager() as manager:
        kept = manager.dict()
        kept["it"] = make((4, 6), 1.5)
        assert all(torch.equal(kept["it"], torch.full((4, 6), 1.5)) for _ in range(3))


def test_spawned_ranks(reductions, sent):
    mp.spawn(_add_rank, (sent,), nprocs=2)
    # Its first column is rank 0's, the next one rank 1's.
    assert sent[0].tolist() == [1.5, 2.5] + [1.5] * 4


def _add_rank(rank, tensor):
    tensor[:, rank] += rank


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        return torch.tensor(float(index * index))


def test_strategy_of_files_with_names(reductions):
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    try:
        assert b"tensorwire" not in bytes(ForkingPickler.dumps(torch.ones(2)))
    finally:
        mp.set_sharing_strategy(before)


def test_message_that_cannot_be_pickled_is_not_waited_for(reductions, monkeypatch):
    """A queue whose caller is on a stream pickles at once; what comes to nothing is discarded."""
    monkeypatch.setattr("tensorwire.torch.reductions._is_on_stream", lambda: True)
    queue, before = mp.get_context("spawn").Queue(1), granted()
    with pytest.raises(Exception, match="lambda|local"):
        queue.put((torch.ones(3), lambda: None))
    until(lambda: granted() == before)
    queue.put(torch.full((3,), 2.0))
    with pytest.raises(_queue.Full):
        queue.put(torch.ones(3), timeout=0.05)
    assert queue.get(timeout=PATIENCE).sum() == 6
    until(lambda: granted() == before)
    queue.close()


def test_written_there_is_seen_here(peer, tensor):
    peer.call(keep, "it", tensorwire.share(tensor))
    peer.call(write, "it", (0, 0), 9.0)
    assert tensor[0, 0] == 9
    peer.call(drop, "it")
