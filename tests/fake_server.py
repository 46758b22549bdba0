"""The whole server but its model: scheduler, engine and HTTP in one process, behind httpx without a socket."""

import asyncio
import contextlib
import threading
import time
from queue import SimpleQueue

import httpx

from fastdeploy_fusion.channel import Channel
from fastdeploy_fusion.serve.api import Api, build_app
from fastdeploy_fusion.serve.blocks import BlockAllocator
from fastdeploy_fusion.serve.chat import ChatTemplate
from fastdeploy_fusion.serve.engine import Engine
from fastdeploy_fusion.serve.frontend import Frontend
from fastdeploy_fusion.serve.metrics import Metrics
from fastdeploy_fusion.serve.prepare import Served, longest_token_of
from fastdeploy_fusion.serve.scheduler import Scheduler
from fastdeploy_fusion.serve.settings import ServeSettings

EOS = 0


class CountingRunner:
    """A "model" that goes on with the next token id. ``gate``: set to let it run.

    ``step_seconds``: what a step of a real model takes, where a test depends on the event loop getting its turn.
    """

    def __init__(self, vocab_size):
        self.vocab_size, self.gate, self.plans = vocab_size, threading.Event(), []
        self.step_seconds = 0.0
        self.gate.set()

    def run(self, plan):
        self.gate.wait(10)
        time.sleep(self.step_seconds)
        self.plans.append(plan)
        return [(plan.tokens[row] + 1) % self.vocab_size for row in plan.rows]


class Same:
    def choose(self, row):
        return row


class FakeServer:
    """Use it as an async context manager; ``client`` speaks to it."""

    def __init__(self, tokenizer, template=None, limit=64, **settings):
        self.settings = ServeSettings(model_name="m", **{"kv_cache_tokens": 256, "max_num_seqs": 4, **settings})
        self.runner = CountingRunner(384)
        served = Served(
            name="m",
            tokenizer=tokenizer,
            template=ChatTemplate(*([template] if template else [])),
            vocab_size=384,
            limit=limit,
            eos=frozenset([EOS]),
            make_sampler=lambda *_: Same(),
            longest_token=longest_token_of(tokenizer),
        )
        s = self.settings
        self.scheduler = Scheduler(
            BlockAllocator(s.num_blocks, s.block_size),
            max_num_seqs=s.max_num_seqs,
            max_num_batched_tokens=s.max_num_batched_tokens,
        )
        metrics = Metrics()
        self.frontend = Frontend(SimpleQueue(), s.max_in_flight, metrics)
        self.engine = Engine(
            self.scheduler,
            self.runner,
            Channel(0, (0,), {}),
            self.frontend.inbox,
            self.frontend.post,
            beat_s=0.05,
            timeout_s=5,
        )
        metrics.add_engine(self.scheduler, self.engine)
        self.api = Api(s, served, self.frontend, more_metrics=lambda: "fused 1\n")
        self.app = build_app(self.api)
        self.thread = threading.Thread(target=self.engine.run, daemon=True)

    async def __aenter__(self):
        self.frontend.attach()
        self.thread.start()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20)
        return self

    async def __aexit__(self, *_):
        self.runner.gate.set()
        self.frontend.drain(0)
        self.thread.join(5)
        assert not self.thread.is_alive()
        with contextlib.suppress(Exception):
            await self.client.aclose()


def serving(tokenizer, body, **settings):
    """The result of ``body(server)``, a coroutine, against a server with these settings."""

    async def main():
        async with FakeServer(tokenizer, **settings) as server:
            return await body(server)

    return asyncio.run(main())


async def until(condition, seconds=5.0):
    """Wait until it holds; AssertionError when it does not in time."""
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to pass")
