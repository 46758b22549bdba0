"""How a server ends: drained by SIGTERM under load, or with one clear error when a rank is lost; nothing stays."""

import os
import shutil
import signal
import socket
import threading
import time

import httpx
import pytest

from tests.servers import FUSED, Server

MAX_SECONDS = 10


class Load:
    """Clients that ask all the time, until told to stop; ``outcomes`` has what became of each request."""

    def __init__(self, server, clients=6, max_tokens=20):
        self.outcomes, self.over = [], threading.Event()
        self.url, self.name, self.max_tokens = server.url, server.name, max_tokens
        self.threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(clients)]
        for thread in self.threads:
            thread.start()

    def _ask(self, number):
        body = {"model": self.name, "prompt": f"number {number}", "max_tokens": self.max_tokens, "ignore_eos": True}
        while not self.over.is_set():
            try:
                answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)
                self.outcomes.append((answer.status_code, answer.json()))
            except httpx.HTTPError as error:
                self.outcomes.append((type(error).__name__, None))
                time.sleep(0.05)

    def wait_for(self, count):
        deadline = time.monotonic() + 30
        while len(self.outcomes) < count:
            assert time.monotonic() < deadline, self.outcomes
            time.sleep(0.02)

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join(40)
        return self.outcomes


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_under_load_drains(data, ranks):
    with Server(data / "glm4_moe_a", *FUSED, ranks=ranks) as server:
        load = Load(server)
        load.wait_for(8)
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"model": server.name, "prompt": "a", "max_tokens": 60, "stream": True, "ignore_eos": True},
            timeout=30,
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            if ranks > 1:  # as a service manager does that signals the whole control group
                os.kill(server.pids()[1], signal.SIGTERM)
            code, seconds = server.end(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        outcomes = load.stop()
        assert (code, server.errors()[0]) == (0, []) and seconds < MAX_SECONDS, server.errors()[1]
    statuses = [status for status, _ in outcomes]
    assert statuses.count(200) >= 8 and set(statuses) <= {200, 503, "ConnectError", "RemoteProtocolError", "ReadError"}
    whole = [document["usage"]["completion_tokens"] for status, document in outcomes if status == 200]
    assert set(whole) == {20}  # what was let in was finished


def test_what_is_not_done_when_the_time_is_over_is_an_error(data):
    with Server(data / "glm4_moe_a", "--drain-seconds", "0.3", ranks=1) as server:
        load = Load(server, clients=4, max_tokens=480)
        time.sleep(1.0)
        code, seconds = server.end(signal.SIGINT)
        outcomes = load.stop()
    assert code == 0 and seconds < MAX_SECONDS
    assert (503, "the server has shut down") in [(s, d and d.get("error", {}).get("message")) for s, d in outcomes]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_signal_ends_it_at_once(data, ranks):
    with Server(data / "glm4_moe_a", "--drain-seconds", "60", ranks=ranks) as server:
        load = Load(server, clients=2, max_tokens=500)
        time.sleep(1.0)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        code, seconds = server.end(signal.SIGTERM)
        load.stop()
        assert (code, server.errors()[0]) == (143, []) and seconds < MAX_SECONDS


@pytest.mark.parametrize("victim, idle", [(1, False), (0, True)])
def test_a_killed_rank_takes_the_server_down(data, victim, idle):
    with Server(data / "glm4_moe_a", *FUSED) as server:
        load = Load(server, clients=0 if idle else 4)
        load.wait_for(0 if idle else 4)
        begin = time.monotonic()
        os.kill(server.pids()[victim], signal.SIGKILL)
        code, _ = server.end(None)
        load.stop()
        assert code == 1 and time.monotonic() - begin < MAX_SECONDS + 2
        errors, text = server.errors()
        assert errors == [f"error: rank {victim} of 2 was killed by SIGKILL"] and "Traceback" not in text


def test_a_killed_launcher_takes_all_with_it(data):
    with Server(data / "glm4_moe_a", *FUSED) as server:
        load = Load(server, clients=2)
        load.wait_for(2)
        code, seconds = server.end(signal.SIGKILL)
        load.stop()
        assert code == -signal.SIGKILL and seconds < MAX_SECONDS


def test_sigterm_before_it_is_ready(data):
    with Server(data / "glm4_moe_a", *FUSED, wait=False) as server:
        time.sleep(1.5)
        code, seconds = server.end(signal.SIGTERM)
        assert code in (143, -signal.SIGTERM) and seconds < 2 * MAX_SECONDS  # an import of Paddle is not cut short
        assert server.errors()[0] == []


def test_a_taken_port_and_a_broken_template_are_one_error(data, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Server(data / "glm4_moe_a", "--port", port, wait=False) as server:
            assert server.end(None)[0] == 2
            (error,) = server.errors()[0]
            assert error.startswith(f"error: can't listen on 127.0.0.1 port {port}: ")
    broken = tmp_path / "model"
    shutil.copytree(data / "glm4_moe_a", broken)
    (broken / "chat_template.jinja").write_text("{% for %}")
    with Server(broken, ranks=1, wait=False) as server:
        assert server.end(None)[0] == 2
        (error,) = server.errors()[0]
        assert "chat template" in error
