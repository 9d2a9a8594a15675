"""Log lines of the library reach the program's standard error, as TENSORWIRE_LOG asks."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import socket, tensorwire
server = tensorwire.TcpServer("127.0.0.1", 0)
with socket.create_connection(("127.0.0.1", server.port)) as stranger:
    stranger.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    assert stranger.recv(1) == b""
"""


@pytest.mark.parametrize("level, lines", [(None, 1), ("error", 0)])
def test_a_closed_connection_is_told(level, lines):
    env = {name: value for name, value in os.environ.items() if not name.startswith("TENSORWIRE_")}
    if level:
        env["TENSORWIRE_LOG"] = level
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("the store closed a connection") == lines, ended.stderr
    assert "\x1b" not in ended.stderr


def test_lines_that_cannot_be_written_are_lost():
    """A full disk behind standard error is no reason to fail."""
    env = {**os.environ, "TENSORWIRE_LOG": "debug"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", PROGRAM], env=env, stderr=full, timeout=60)
    assert ended.returncode == 0
