"""Groups over the stores that torch hands over, formed by real processes (torch_store_ranks.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("torch_store_ranks.py")
WANTED = [
    "over_tcp:2:libuv",
    "over_tcp:3:legacy",
    "over_tcp_prefixed:3:libuv",
    "over_tcp_prefixed:2:legacy",
    "over_slow_tcp:1:libuv",
    "over_full_tcp:2:libuv",
    "over_full_tcp:2:legacy",
    "over_file:2:libuv",
    "over_file:3:libuv",
    "over_file_prefixed:3:libuv",
    "over_hash:1:libuv",
    "over_user:2:libuv",
    "over_user_prefixed:3:libuv",
    "over_poor:2:libuv",
    "over_poor:3:libuv",
    "over_subclass:2:libuv",
    "mixed:3:libuv",
    "mixed:3:legacy",
    "waiting_thread:2:libuv",
    "late:1:libuv",
    "brittle:1:libuv",
    "stuck:1:libuv",
    "nonsense:1:libuv",
    "interrupted:1:libuv",
    "dead_server:1:libuv",
    "end_of_interpreter:2:libuv",
]
NATIVE = "reached by a client of ours"
METHODS = "served by its Python methods"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What the ranks of each case gave and logged. One process runs all cases, because the import of torch is slow."""
    folder = tmp_path_factory.mktemp("stores")
    env = {**os.environ, "TENSORWIRE_LOG": "warn,tensorwire_native=debug"}
    command = [sys.executable, str(SCRIPT), str(folder), *WANTED]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


def results(outcomes, case):
    outcome = outcomes[case]
    assert "results" in outcome, outcome
    assert outcome["left"] == [], "a probe was left in the store"
    return outcome["results"]


def names(kind):
    return [name for name in WANTED if name.startswith(kind)]


@pytest.mark.parametrize("case", [*names("over_"), *names("mixed"), *names("waiting_thread")])
def test_a_group_is_formed_used_and_split(outcomes, case):
    world = int(case.split(":")[1])
    for rank, result in enumerate(results(outcomes, case)):
        halves = len(range(rank % 2, world, 2))
        expected = [sum(range(1, world + 1)), [halves, halves], world]
        assert result[:3] == expected
        assert all(result[3:]), "the methods of the user's store were not called"


@pytest.mark.parametrize("case", [name for name in WANTED if "tcp" in name or "waiting_thread" in name])
def test_a_tcp_store_is_reached_again_natively(outcomes, case):
    for log in outcomes[case]["logs"].values():
        assert NATIVE in log
        assert METHODS not in log


@pytest.mark.parametrize("case", [*names("over_file"), *names("over_user"), *names("over_subclass")])
def test_other_stores_are_served_by_their_methods(outcomes, case):
    for log in outcomes[case]["logs"].values():
        assert METHODS in log
        assert NATIVE not in log


@pytest.mark.parametrize("case", names("mixed"))
def test_ranks_may_reach_one_store_in_both_ways(outcomes, case):
    logs = outcomes[case]["logs"]
    assert METHODS in logs["0"]
    assert NATIVE in logs["1"] and NATIVE in logs["2"]


def test_only_a_full_store_makes_torch_complain(outcomes):
    """The prefix in a store with many keys is learnt from a complaint of torch, which it logs; else quietly."""
    assert "waitForInput" in outcomes["over_full_tcp:2:libuv"]["logs"]["0"]
    assert "waitForInput" not in outcomes["over_tcp_prefixed:3:libuv"]["logs"]["0"]


def test_a_missing_rank_is_named_in_time(outcomes):
    [(kind, text, took)] = results(outcomes, "late:1:libuv")
    assert kind == "TimeoutError"
    assert "rank 1" in text
    assert took >= 1.0


def test_a_method_that_never_comes_back_does_not_hold_us_up(outcomes):
    [(kind, text, _)] = results(outcomes, "stuck:1:libuv")
    assert kind == "TimeoutError"
    assert "Stuck" in text


def test_an_odd_exception_becomes_an_error_of_ours(outcomes):
    [(kind, text, _)] = results(outcomes, "brittle:1:libuv")
    assert kind == "PeerError"
    assert "ZeroDivisionError" in text and "Brittle" in text and "today" in text
    assert "more lines" not in text


def test_what_is_no_store_is_refused(outcomes):
    [(kind, text, _)] = results(outcomes, "nonsense:1:libuv")
    assert kind == "MisuseError"
    assert "int" in text and "set" in text


def test_ctrl_c_is_answered(outcomes):
    [took] = results(outcomes, "interrupted:1:libuv")
    assert len(took) == 2


def test_a_server_that_is_gone_is_named(outcomes):
    outcome = outcomes["dead_server:1:libuv"]
    [(_, text, _)] = results(outcomes, "dead_server:1:libuv")
    assert "TCPStore of torch at localhost" in text
    assert "is served by its Python methods" in outcome["logs"]["0"], "it fell back without a word"


def test_a_group_may_outlive_the_interpreter(outcomes):
    assert results(outcomes, "end_of_interpreter:2:libuv") == [True, True]
    for log in outcomes["end_of_interpreter:2:libuv"]["logs"].values():
        assert "Error" not in log and "panic" not in log


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_the_store_of_torchruns_agent(backend):
    # --rdzv-endpoint with port 0 lets c10d take a free port; --standalone is the same with a run id of its own.
    chosen = ["--standalone"] if backend == "c10d" else ["--master-port", str(free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *chosen, str(SCRIPT)]
    env = {**os.environ, "TENSORWIRE_LOG": "warn,tensorwire_native=debug"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    # Two ranks write to one pipe: their lines may run into each other.
    lines = [json.loads(line) for line in done.stdout.replace("][", "]\n[").splitlines() if line.startswith("[")]
    # Bare or under a prefix, as the version of torch and the launcher have it.
    assert {kind for kind, _ in lines} <= {"TCPStore", "PrefixStore"}
    assert [result for _, result in lines] == [[3.0, [1, 1], 2]] * 2
    assert done.stderr.count(NATIVE) == 4, done.stderr


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
