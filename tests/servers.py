"""Real servers for tests and tools: started from the shell, watched, and nothing of them left behind."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.leftovers import new_segments, processes_with

_TOKEN = "SERVE_TEST_TOKEN"
FUSED = ("--enable-flashinfer-allreduce-fusion",)


class Server:
    """``with Server(model, *flags) as server``: ready, on a free port. Its stderr is kept in a file."""

    def __init__(self, model, *flags, ranks=2, timeout_s=60, wait=True, **environment):
        self.token = f"{os.getpid()}.{secrets.token_hex(4)}."
        self.shm_before = set(os.listdir("/dev/shm"))
        self.err = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        command = [sys.executable, "-m", "fastdeploy_fusion", "serve", "--model", model, "--port", "0"]
        command += ["--tensor-parallel-size", ranks, *flags]
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, _TOKEN: self.token, **environment},
            stdout=subprocess.PIPE,
            stderr=self.err,
        )
        self.timeout_s = timeout_s
        self.name, self.url, self.ready_line = Path(model).name, "", ""
        if wait:
            self.wait_ready()

    def wait_ready(self):
        os.set_blocking(self.process.stdout.fileno(), False)
        deadline, said = time.monotonic() + self.timeout_s, b""
        while not said.endswith(b"\n"):
            assert self.process.poll() is None and time.monotonic() < deadline, self._give_up()
            said += self.process.stdout.read() or b""
            time.sleep(0.02)
        self.ready_line = said.decode()
        self.url = re.match(r"ready: \S+ at (http://\S+)/v1;", self.ready_line)[1]

    def client(self, **options):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=60, **{"api_key": "none", **options})

    def pids(self):
        """Of the living: {rank: pid}, and "launcher"."""
        found = {"launcher": self.process.pid}
        for pid in processes_with(f"{_TOKEN}={self.token}"):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if pid != self.process.pid and (rank := re.search(rb"PADDLE_TRAINER_ID=(\d+)\0", environment)):
                found[int(rank[1])] = pid
        return found

    def metrics(self):
        """{sample with its labels: value}."""
        import httpx

        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def errors(self):
        """The lines of stderr that say what went wrong."""
        self.err.seek(0)
        text = self.err.read().decode()
        return [line for line in text.splitlines() if line.startswith("error:")], text

    def end(self, number=signal.SIGTERM, timeout_s=30):
        """(exit code, seconds) after a signal to the launcher; None: it ends by itself. Nothing may be left then."""
        begin = time.monotonic()
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        seconds = time.monotonic() - begin
        deadline = time.monotonic() + 3
        while (left := processes_with(f"{_TOKEN}={self.token}")) or (left := new_segments(self.shm_before)):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.02)
        return code, seconds

    def _give_up(self):
        return f"the server did not get ready\n{self.errors()[1]}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in processes_with(f"{_TOKEN}={self.token}"):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.err.close()
