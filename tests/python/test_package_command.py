"""The command that the wheel brings is the native one: its exit codes, its signals, its output."""

import importlib.metadata
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig
import time

import pytest

import tensorwire

COMMAND = [sys.executable, "-m", "tensorwire"]
LIMIT = 60
BENCH = ["bench", "all-reduce", "-n", "2", "--sizes", "1K", "--seconds", "0.05", "--bind", "none", "--json"]


@pytest.fixture(autouse=True)
def answers_ctrl_c():
    """Background jobs of a shell ignore it, and so would what they start."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


def run(*args, **options):
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=LIMIT, **options)


def test_version():
    assert run("--version").stdout == f"tensorwire {tensorwire.__version__}\n"


def test_the_script_is_the_command():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="tensorwire")
    assert script.load().__module__ == "tensorwire.__main__"
    path = pathlib.Path(sysconfig.get_path("scripts")) / "tensorwire"
    if path.exists():
        assert subprocess.check_output([path, "--version"], text=True, timeout=LIMIT).startswith("tensorwire ")


@pytest.mark.parametrize("args, code", [(["--help"], 0), ([], 2), (["no-such-thing"], 2), (["run", "-n", "0", "x"], 2)])
def test_exit_codes(args, code):
    ended = run(*args)
    assert ended.returncode == code, ended
    assert "Usage: tensorwire" in ended.stdout + ended.stderr or code


@pytest.mark.parametrize(
    "program, code",
    [
        (["sh", "-c", "exit 0"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["/no/such/program"], 127),
        (["/"], 126),
    ],
)
def test_run_gives_the_code_of_its_ranks(program, code):
    ended = run("run", "-n", "2", "--", *program)
    assert ended.returncode == code, ended
    assert "Traceback" not in ended.stderr


def test_run_starts_ranks():
    ended = run("run", "-n", "3", "--no-prefix", "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank} of 3" for rank in range(3)]


def test_arguments_that_are_not_text():
    ended = run("run", "-n", "1", "--no-prefix", "--", "printf", "%s", os.fsdecode(b"\xff\xfe"), errors="surrogateescape")
    assert os.fsencode(ended.stdout) == b"\xff\xfe"


def test_ranks_have_the_signals_of_a_fresh_process():
    """The interpreter ignores some, and what is ignored is inherited."""
    ended = run("run", "-n", "1", "--no-prefix", "--", "grep", "SigIgn", "/proc/self/status")
    ignored = int(ended.stdout.split()[1], 16)
    # 32 and 33 are the C library's own, and it is it that ignores them when it starts a process.
    assert ignored & ~(0b11 << 31) == 0, ended


def test_import_from_elsewhere_is_not_disturbed(tmp_path):
    """The folder where the command is called may hold files with names of modules."""
    for name in ("tensorwire", "signal", "enum"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file')")
    script = "from tensorwire.__main__ import main; main()"
    command = [sys.executable, "-P", "-c", script, "run", "-n", "1", "--no-prefix", "--", "echo", "well"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert ended.stdout == "well\n", ended


def test_reader_that_leaves_is_no_failure():
    with subprocess.Popen([*COMMAND, "completions", "bash"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait(LIMIT) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_server_as_the_native_command(number):
    command = [*COMMAND, "store", "serve", "--host=127.0.0.1", "--port=0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert "port" in server.stdout.readline()
            server.send_signal(number)
            code = server.wait(LIMIT)
        finally:
            server.kill()
        assert "Traceback" not in server.stderr.read()
        assert code in (0, -number, 128 + number)


def test_ctrl_c_ends_the_ranks():
    program = "import signal, time; print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [*COMMAND, "run", "-n", "2", "--no-prefix", "--", sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        try:
            assert [command.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            command.send_signal(signal.SIGINT)
            assert command.wait(LIMIT) == 128 + signal.SIGINT
        finally:
            command.kill()
        # The ranks were interrupted, and not the command.
        assert command.stderr.read().count("KeyboardInterrupt") == 2


def test_nothing_outlives_a_killed_command():
    program = "echo $$; sleep 600 & echo $!; wait"
    with subprocess.Popen(
        [*COMMAND, "run", "-n", "2", "--no-prefix", "--", "sh", "-c", program], stdout=subprocess.PIPE, text=True
    ) as command:
        try:
            below = [int(command.stdout.readline()) for _ in range(4)]
        finally:
            command.kill()
        command.wait(LIMIT)
    deadline = time.monotonic() + LIMIT
    while left := [pid for pid in below if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def is_running(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_bench_starts_its_own_ranks():
    """They are this interpreter, too."""
    ended = run(*BENCH)
    assert ended.returncode == 0, ended
    assert "all-reduce" in ended.stdout.replace("_", "-")


def test_doctor_and_status():
    ended = run("doctor", "--json")
    assert ended.returncode in (0, 1) and "Traceback" not in ended.stderr, ended
    # This process may lend memory, which would be shown.
    with subprocess.Popen(["sleep", "60"]) as other:
        ended = run("status", str(other.pid))
        other.kill()
    assert ended.returncode != 0 and "is in no group" in ended.stderr, ended
