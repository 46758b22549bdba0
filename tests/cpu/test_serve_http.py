"""The HTTP side on real sockets: how many connections there may be, how long they may idle, how it stops."""

import logging
import socket
import subprocess
import sys
import time

import httpx
import pytest

from fastdeploy_fusion.serve.connections import share
from fastdeploy_fusion.serve.http import HttpThread, listen_on

UNFINISHED = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def app(scope, receive, send):
    """Answers at once, but for /stall, which never ends."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/stall":
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def serve():
    threads = []

    def start(max_in_flight=8, **options):
        sock = listen_on("127.0.0.1", 0)
        address = sock.getsockname()
        thread = HttpThread(app, sock, max_in_flight, lambda: None, **options)
        thread.start()
        threads.append(thread)
        return thread, address

    yield start
    for thread in threads:
        thread.stop()


def is_closed(sock, within_s):
    """Whatever was still to be read before."""
    sock.settimeout(within_s)
    try:
        while sock.recv(1000):
            pass
        return True
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def status(address, path="/"):
    return httpx.get(f"http://{address[0]}:{address[1]}{path}", timeout=5).status_code


def test_a_head_has_to_come_in_time_however_it_drips(serve):
    _, address = serve(head_s=0.4)
    with socket.create_connection(address) as silent, socket.create_connection(address) as second:
        with socket.create_connection(address) as dripping:
            second.sendall(UNFINISHED + b"\r\n")
            assert second.recv(100).startswith(b"HTTP/1.1 200")
            second.sendall(UNFINISHED)  # the next request of a connection that is kept
            begin = time.monotonic()
            with pytest.raises(ConnectionError):
                for byte in UNFINISHED * 3:
                    dripping.sendall(bytes([byte]))
                    time.sleep(0.05)
            assert time.monotonic() - begin < 2
        assert is_closed(silent, 1) and is_closed(second, 1)


def test_an_answer_may_take_longer_than_a_head(serve):
    _, address = serve(head_s=0.2)
    with socket.create_connection(address) as sock:
        sock.sendall(b"GET /stall HTTP/1.1\r\nHost: x\r\n\r\n")
        assert not is_closed(sock, 0.6)


def test_idle_connections_keep_nobody_out(serve):
    thread, address = serve()
    thread._connections.limit = 5
    held = []
    for _ in range(20):
        held.append(socket.create_connection(address))
        held[-1].sendall(UNFINISHED)
    assert [status(address) for _ in range(3)] == [200] * 3
    assert len(thread._connections.open) <= 5
    assert is_closed(held[0], 1) and not is_closed(held[-1], 0.1)
    for sock in held:
        sock.close()


def test_it_stops_without_a_word_whoever_is_still_connected(serve, caplog):
    thread, address = serve()
    with caplog.at_level(logging.DEBUG), socket.create_connection(address) as sock:
        sock.sendall(b"GET /stall HTTP/1.1\r\nHost: x\r\n\r\n")
        sock.recv(100)
        begin = time.monotonic()
        thread.stop()
        assert time.monotonic() - begin < 4
        assert not thread._thread.is_alive()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_requests_that_are_no_http_are_not_logged(serve, caplog):
    _, address = serve()
    with socket.create_connection(address) as sock:
        sock.sendall(b"no http at all\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 400")
    assert caplog.records == []


def test_one_port_is_for_one_server():
    with listen_on("127.0.0.1", 0) as sock, pytest.raises(ValueError, match="choose another --host or --port"):
        listen_on("127.0.0.1", sock.getsockname()[1])


def test_connections_stay_below_the_descriptors():
    assert share(1344, 100_000) == (1344, 2048)
    for descriptors in (3000, 1000, 192, 4):
        connections, backlog = share(1344, descriptors)
        assert connections >= 1 and backlog >= 1 and connections + backlog <= descriptors


def test_the_soft_limit_is_raised_and_the_hard_one_kept_to():
    script = (
        "import resource; from fastdeploy_fusion.serve.connections import room_for\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))\n"
        "print(*room_for(1344), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    for hard, enough in ((4000, True), (512, False)):
        command = [sys.executable, "-c", script.format(hard=hard)]
        out = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        connections, backlog, soft = map(int, out.split())
        assert connections + backlog < soft <= hard and soft > 256
        assert (connections == 1344) == enough
