"""The same program under every launcher: it asks nobody but tensorwire.init() who it is."""

import os
import socket
import subprocess
import sys

import pytest

LIMIT = 120

PROGRAM = """
import array, tensorwire
group = tensorwire.init(timeout=100)
numbers = array.array("d", [group.rank + 1])
group.all_reduce(numbers)
# In one write: the line of another rank may come in between otherwise.
print(f"rank {group.rank} of {group.world}: {numbers[0]:g}\\n", end="", flush=True)
tensorwire.finalize()
"""
WANTED = ["rank 0 of 2: 3", "rank 1 of 2: 3"]

# For mp.spawn, which sets no variables: it gives each process its rank as an argument.
SPAWN = """
import array, sys
import {module} as multiprocessing
import tensorwire

def work(rank, address):
    group = tensorwire.init(address, rank=rank, world=2, timeout=100)
    numbers = array.array("d", [rank + 1])
    group.all_reduce(numbers)
    print(f"rank {{group.rank}} of {{group.world}}: {{numbers[0]:g}}\\n", end="", flush=True)

if __name__ == "__main__":
    {start}
"""
START_TORCH = "multiprocessing.spawn(work, args=(sys.argv[1],), nprocs=2)"
START_PYTHON = """
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=work, args=(rank, sys.argv[1])) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))
"""

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "PMIX_", "MPI_")


@pytest.fixture
def bare(monkeypatch):
    """No launcher around the tests themselves is seen."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture
def program(tmp_path, bare):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def lines_of(*command):
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=LIMIT)
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.split("\n"))[1:]


def test_tensorwire_run(program):
    command = ["-m", "tensorwire", "run", "-n", "2", "--no-prefix", "--", sys.executable, program]
    assert lines_of(*command) == WANTED


def test_torchrun(program):
    pytest.importorskip("torch")
    assert lines_of("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program) == WANTED


def test_mp_spawn_of_torch(tmp_path, bare):
    pytest.importorskip("torch")
    program = tmp_path / "program.py"
    program.write_text(SPAWN.format(module="torch.multiprocessing", start=START_TORCH))
    assert lines_of(str(program), f"file://{tmp_path}/meet") == WANTED


def test_spawn_of_python(tmp_path, bare):
    program = tmp_path / "program.py"
    program.write_text(SPAWN.format(module="multiprocessing", start=START_PYTHON.strip()))
    assert lines_of(str(program), f"tcp://127.0.0.1:{free_port()}") == WANTED


def test_variables_of_mpirun(program):
    def variables(rank):
        return {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": 2,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
            "PMIX_NAMESPACE": f"prterun-{os.getpid()}-mpi",
        }

    assert ranks_with(program, variables) == WANTED


def test_variables_of_mpirun_on_several_hosts(program):
    """There the user says where rank 0 is."""
    port = free_port()

    def variables(rank):
        return {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": 2,
            "OMPI_COMM_WORLD_LOCAL_RANK": 0,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }

    assert ranks_with(program, variables) == WANTED


def test_variables_of_srun(program):
    def variables(rank):
        return {
            "SLURM_PROCID": rank,
            "SLURM_NTASKS": 2,
            "SLURM_LOCALID": rank,
            "SLURM_JOB_ID": os.getpid(),
            "SLURM_STEP_ID": 0,
            "SLURM_STEP_NODELIST": "localhost",
        }

    assert ranks_with(program, variables) == WANTED


def test_variables_of_pmi(program):
    """Of MPICH and Intel MPI."""

    def variables(rank):
        return {
            "PMI_RANK": rank,
            "PMI_SIZE": 2,
            "MPI_LOCALRANKID": rank,
            "MPI_LOCALNRANKS": 2,
            "PMI_JOBID": f"pmi-{os.getpid()}",
        }

    assert ranks_with(program, variables) == WANTED


def ranks_with(program, variables):
    """Two ranks with these variables, as their launcher would start them."""
    ranks = [
        subprocess.Popen(
            [sys.executable, program],
            env=os.environ | {name: str(value) for name, value in variables(rank).items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=LIMIT) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    return [out.strip() for out, _ in ended]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
