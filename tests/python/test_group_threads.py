"""Many threads, callbacks and asyncio."""

import asyncio
import gc
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from ranks import here

import tensorwire

SOON = 60


def in_threads(*bodies):
    """Runs them all at once; raises what one of them raised."""
    errors = []

    def guard(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def test_threads_with_groups_of_their_own(pools):
    pools(2).run(check_own_groups)


def check_own_groups():
    groups = [here().fresh() for _ in range(6)]

    def body(number):
        def run():
            for i in range(30):
                x = np.full(1 + 1000 * (i % 2), number + i, "i8")
                if i % 3:
                    groups[number].all_reduce(x)
                else:
                    groups[number].all_reduce(x, async_op=True).wait()
                assert (x == 2 * (number + i)).all()
            groups[number].barrier()

        return run

    in_threads(*[body(number) for number in range(6)])
    for group in groups:
        group.close()


def test_threads_that_send_in_one_group(pools):
    pools(2).run(check_one_group)


def check_one_group():
    group, rank = here().group, here().rank

    def body(tag):
        def run():
            for i in range(50):
                if rank == 0:
                    group.send(np.array([tag, i]), 1, tag)
                else:
                    x = np.zeros(2, "i8")
                    group.recv(x, 0, tag)
                    assert x.tolist() == [tag, i]

        return run

    in_threads(*[body(tag) for tag in range(6)])
    group.barrier()


def test_one_thread_waits_while_others_start(pools):
    pools(2).run(check_wait_while_start)


def check_wait_while_start():
    group, own, rank = here().fresh(), here().group, here().rank
    x, y = np.zeros(4), np.zeros(4)
    first = group.recv(x, 1 - rank, 1, async_op=True)
    waiting = threading.Thread(target=first.wait)
    waiting.start()
    time.sleep(0.05)
    assert not first.done()
    second = group.recv(y, 1 - rank, 2, async_op=True)
    group.send(np.full(4, 2.0), 1 - rank, 2)
    second.wait()
    assert (y == 2).all() and not first.done()
    own.barrier()
    group.send(np.full(4, 1.0), 1 - rank, 1)
    waiting.join(SOON)
    assert first.done() and (x == 1).all()
    # Many threads may wait for one work.
    work = group.all_reduce(x, async_op=True)
    in_threads(*[work.wait] * 8)
    assert (x == 2).all()
    group.barrier()
    group.close()


# Callbacks


def test_callbacks(pools):
    pools(2).run(check_callbacks)


def check_callbacks():
    group, own, rank = here().fresh(), here().group, here().rank
    if rank == 0:
        calls, called = [], threading.Event()

        def callback(work):
            calls.append((work, threading.current_thread()))
            called.set()

        work = group.recv(np.zeros(1), 1, async_op=True)
        work.on_done(callback)
        assert not calls
        own.barrier()
        assert called.wait(SOON)
        assert calls[0][0] is work and calls[0][0].done()
        assert calls[0][1] is not threading.main_thread()
        # At once where it is over.
        called.clear()
        work.on_done(callback)
        assert len(calls) == 2 and calls[1] == (work, threading.current_thread())
        done = group.send(np.zeros(1), 0)
        done.on_done(callback)
        assert calls[2][0] is done
        with pytest.raises(TypeError):
            work.on_done(3)
    else:
        own.barrier()
        group.send(np.zeros(1), 0)
    own.barrier()
    group.close()


def test_a_callback_of_a_failed_work(pools):
    pools(2).run(check_failed_callback)


def check_failed_callback():
    group = here().fresh()
    errors, called = [], threading.Event()
    work = group.recv(np.zeros(1), here().rank, async_op=True)
    work.on_done(lambda work: (errors.append(work.error()), called.set()))
    group.barrier()
    group.abort("done with it")
    assert called.wait(SOON)
    assert isinstance(errors[0], tensorwire.AbortedError) and "done with it" in str(errors[0])
    here().group.barrier()


def test_a_callback_that_raises_harms_nobody(pools):
    pools(2).run(check_raising)


def check_raising():
    group, own, rank = here().fresh(), here().group, here().rank
    seen, called = [], threading.Event()
    old = sys.unraisablehook
    sys.unraisablehook = lambda info: (seen.append(info.exc_value), called.set())
    try:

        def wrong(work):
            raise ArithmeticError("in a callback")

        work = group.recv(np.zeros(1), 1 - rank, async_op=True)
        work.on_done(wrong)
        own.barrier()
        group.send(np.zeros(1), 1 - rank)
        assert called.wait(SOON)
        assert str(seen[0]) == "in a callback"
        work.wait()
        assert work.error() is None
        group.barrier()
    finally:
        seen.clear()
        sys.unraisablehook = old
    group.close()


def test_callbacks_may_use_the_group(pools):
    """A chain: each callback starts the next operation and waits for it, whose callback does the same."""
    pools(2).run(check_chain)


def check_chain():
    group, own = here().fresh(), here().group
    x, over = np.full(1, 1.0), threading.Event()
    errors = []

    def step(depth):
        def callback(work):
            try:
                if depth == 10:
                    over.set()
                    return
                following = group.all_reduce(x, async_op=True)
                following.on_done(step(depth + 1))
                following.wait()
                # Messages: the order of collectives must be the same on all ranks, and other callbacks start some.
                sent = group.send(x, group.rank, depth, async_op=True)
                group.recv(np.zeros(1), group.rank, depth)
                sent.wait()
            except BaseException as error:
                errors.append(error)
                over.set()

        return callback

    work = group.all_reduce(x, async_op=True)
    work.on_done(step(1))
    assert over.wait(SOON), "a callback hangs"
    assert not errors, errors
    assert x[0] == 2**10
    own.barrier()
    group.close()


def test_many_callbacks_that_wait_for_each_other(pools):
    pools(2).run(check_many_waiting)


def check_many_waiting():
    group, own, rank = here().fresh(), here().group, here().rank
    last = group.recv(np.zeros(1), 1 - rank, 99, async_op=True)
    over = [threading.Event() for _ in range(20)]
    works = [group.recv(np.zeros(1), 1 - rank, tag, async_op=True) for tag in range(20)]
    for work, event in zip(works, over, strict=True):
        work.on_done(lambda _, event=event: (last.wait(), event.set()))
    own.barrier()
    for tag in range(20):
        group.send(np.zeros(1), 1 - rank, tag)
    for work in works:
        work.wait()
    assert not any(event.is_set() for event in over)
    own.barrier()
    group.send(np.zeros(1), 1 - rank, 99)
    for event in over:
        assert event.wait(SOON)
    own.barrier()
    group.close()


def test_a_callback_may_drop_everything(pools):
    pools(2).run(check_drop_in_callback)


def check_drop_in_callback():
    own, rank = here().group, here().rank
    over = threading.Event()
    holder = {"group": here().fresh()}
    holder["work"] = holder["group"].recv(np.zeros(1), 1 - rank, async_op=True)
    sender = holder["group"]

    def callback(work):
        holder.clear()
        gc.collect()
        over.set()

    holder["work"].on_done(callback)
    sender.send(np.zeros(1), 1 - rank)
    del sender
    assert over.wait(SOON)
    own.barrier()


def test_a_work_with_a_callback_is_freed(pools):
    pools(2).run(check_freed)


def check_freed():
    group = here().group

    class Token:
        pass

    tokens = []
    for _ in range(20):
        token = Token()
        tokens.append(weakref.ref(token))
        work = group.all_reduce(np.zeros(3), async_op=True)
        work.on_done(lambda _, token=token: None)
        del token, work
    group.barrier()
    for _ in range(500):
        if not any(token() for token in tokens):
            break
        time.sleep(0.01)
    assert not any(token() for token in tokens)


# asyncio


def test_await(pools):
    pools(2).run(check_await)


def check_await():
    group = here().group

    async def main():
        x = np.ones(5)
        assert await group.all_reduce(x, async_op=True) is None
        assert (x == 2).all()
        await group.all_reduce(x)  # one that is over
        many = [np.full(3, i) for i in range(100)]
        await asyncio.gather(*[as_coroutine(group.all_reduce(one, async_op=True)) for one in many])
        assert all((one == 2 * i).all() for i, one in enumerate(many))

    asyncio.run(asyncio.wait_for(main(), SOON))


async def as_coroutine(work):
    await work


def test_the_loop_runs_while_a_work_is_awaited(pools):
    pools(2).run(check_loop_runs)


def check_loop_runs():
    group, rank = here().fresh(), here().rank

    async def main():
        x = np.zeros(1)
        work = group.recv(x, 1 - rank, async_op=True)
        ticks = 0

        async def tick():
            nonlocal ticks
            for _ in range(10):
                await asyncio.sleep(0.01)
                ticks += 1
            group.send(np.ones(1), 1 - rank)

        await asyncio.gather(as_coroutine(work), tick())
        assert ticks == 10 and x[0] == 1

    asyncio.run(asyncio.wait_for(main(), SOON))
    group.barrier()
    group.close()


def test_errors_of_awaited_works(pools):
    pools(2).run(check_await_error)


def check_await_error():
    group, rank = here().fresh(), here().rank

    async def main():
        with pytest.raises(tensorwire.TimeoutError):
            await group.recv(np.zeros(1), 1 - rank, timeout=0.2, async_op=True)
        works = [group.recv(np.zeros(1), 1 - rank, tag, async_op=True) for tag in (1, 2)]
        asyncio.get_running_loop().call_later(0.1, group.abort, "cold feet")
        results = await asyncio.gather(*map(as_coroutine, works), return_exceptions=True)
        assert all(isinstance(result, tensorwire.AbortedError) for result in results), results

    asyncio.run(asyncio.wait_for(main(), SOON))
    here().group.barrier()


def test_a_cancelled_await(pools):
    pools(2).run(check_cancel)


def check_cancel():
    """A collective or a send goes on; test_group_messages.py has receives, which do not."""
    group, own, rank = here().fresh(), here().group, here().rank
    x, large = np.zeros(1), np.ones(1_000_000)
    works = []

    async def main():
        works.extend([group.all_reduce(x, async_op=True), group.send(large, 0, async_op=True)])
        for work in works:
            task = asyncio.ensure_future(as_coroutine(work))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(as_coroutine(work), 0.05)
            assert not work.done() and not work.withdraw()

    if rank == 1:
        asyncio.run(asyncio.wait_for(main(), SOON))
    # The loop is closed now; the works go on.
    own.barrier()
    if rank == 0:
        group.all_reduce(x)
        group.recv(np.zeros_like(large), 1)
    for work in works:
        work.wait()

    async def again():
        for work in works:
            await work

    asyncio.run(again())
    own.barrier()
    group.close()


def test_await_without_a_loop(pools):
    pools(1).run(check_no_loop)


def check_no_loop():
    work = here().group.barrier()
    with pytest.raises(RuntimeError):
        next(iter(work.__await__()))


# Many operations


def test_thousands_of_operations_in_flight(pools):
    pools(2).run(check_thousands)


def check_thousands():
    group = here().group
    arrays = [np.full(4, i, "i8") for i in range(3000)]
    works = [group.all_reduce(x, async_op=True) for x in arrays]
    for work in works:
        work.wait()
    assert all((x == 2 * i).all() for i, x in enumerate(arrays))


#: Threads that are started while a file is there begin when it is gone: as on a machine that is very busy.
LATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
struct start { void *(*run)(void *); void *with; };
static void *late(void *given) {
    struct start start = *(struct start *)given;
    free(given);
    while (access(getenv("LATE"), F_OK) == 0) usleep(1000);
    return start.run(start.with);
}
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *with) {
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
    struct start *start = malloc(sizeof *start);
    start->run = run;
    start->with = with;
    return real(thread, how, late, start);
}
"""

ONE_BY_ONE = """
import os, threading
import tensorwire
from tensorwire import _native
group = _native.Group.from_store(tensorwire.MemoryStore(), 0, 1, timeout=60)
def push(tag):
    begun, go = threading.Event(), threading.Event()
    work = group.recv(bytearray(8), 0, tag, async_op=True)
    work.on_done(lambda _: (begun.set(), go.wait(60)))
    group.send(bytearray(8), 0, tag)
    work.wait()
    return begun, go
begun, go = push(0)
assert begun.wait(60)
open(os.environ["LATE"], "w").close()
before = len(os.listdir("/proc/self/task"))
for tag in range(1, 21):
    begun, after = push(tag)
    go.set()
    assert begun.wait(60), "the thread that is free has not taken it"
    go = after
print(len(os.listdir("/proc/self/task")) - before)
os.unlink(os.environ["LATE"])
go.set()
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_threads_for_callbacks_that_start_late_are_counted(tmp_path):
    """At most one callback runs and one waits: one more thread is enough, however long it takes to begin."""
    (tmp_path / "late.c").write_text(LATE)
    library = str(tmp_path / "late.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "late.c"), "-ldl"], check=True, timeout=100)
    env = os.environ | {"LD_PRELOAD": library, "LATE": str(tmp_path / "closed")}
    done = subprocess.run([sys.executable, "-c", ONE_BY_ONE], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and int(done.stdout) <= 1, (done.returncode, done.stdout, done.stderr)
