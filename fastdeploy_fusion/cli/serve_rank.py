"""One rank's part of `serve`: the first one speaks HTTP and schedules, the others follow."""

import contextlib
import ipaddress
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from ..config import FusionConfig, ParallelConfig
from ..launch import leave, leave_on_sigterm, started_as_rank, wait_for_first_rank
from ..serve.settings import ServeSettings
from .output import answer_only_on_stdout
from .ranks import quiet_paddle, wrong_input

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005  # the HTTP side's thread must not keep the interpreter from the engine for Python's usual 5 ms


def serve_on_this_rank(
    dtype: str, layout: ParallelConfig, fusion: FusionConfig, model_dir: Path, settings: ServeSettings
) -> int:
    """Serves until SIGTERM or SIGINT; all ranks call it alike. Rank 0 says on stdout when it is ready.

    Raises:
        UsageError: the checkpoint, the address or the configuration can't be used.
        FusionError: the run failed; PeerLost when another rank did.
    """
    with answer_only_on_stdout() as answer:
        quiet_paddle()
        with _sigterm_later():
            from fastdeploy_fusion import models

            from ..parallel import Parallel
            from ..serve.step import ModelRunner
        wait_for_first_rank()
        with contextlib.ExitStack() as open_things:
            with wrong_input():
                config = models.load_config(model_dir)
                fusion = models.settle_fusion(fusion, config, layout)
                parallel = open_things.enter_context(
                    Parallel.open(layout, fusion, hidden_size=config.hidden_size, dtype=dtype)
                )
                leave_on_sigterm()
                is_first = parallel.world.rank == 0
                desk = open_things.enter_context(_Desk(model_dir, config, settings)) if is_first else None
                model = models.load_model(model_dir, parallel, dtype)
            runner = ModelRunner(
                model,
                num_slots=settings.max_num_seqs,
                num_blocks=settings.num_blocks,
                block_size=settings.block_size,
            )
            runner.warm_up()
            group = parallel.replica.fork()
            open_things.callback(group.close)
            if desk is not None:
                desk.serve(parallel, runner, group, answer)
            else:
                # The first rank decides when to end, whoever else got the signal.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                from ..serve.engine import follow

                follow(runner, group.channel, group.timeout_s)
    return 0


class _Desk:
    """What only the first rank has: tokenizer, scheduler, HTTP. Made before the weights are read, so that a taken port
    or a damaged tokenizer shows at once."""

    def __init__(self, model_dir: Path, config: Any, settings: ServeSettings) -> None:
        from ..serve.chat import ChatTemplate
        from ..serve.http import listen_on
        from ..serve.prepare import Served, longest_token_of
        from ..tokenizer import load_tokenizer

        self.settings, self.hidden_size = settings, config.hidden_size
        tokenizer = load_tokenizer(model_dir)
        room = settings.num_blocks * settings.block_size
        self.served = Served(
            name=settings.model_name,
            tokenizer=tokenizer,
            template=ChatTemplate.load(model_dir),
            vocab_size=config.vocab_size,
            limit=min(room, config.max_position_embeddings or room),
            eos=frozenset(config.eos_token_ids),
            make_sampler=_make_sampler,
            longest_token=longest_token_of(tokenizer),
        )
        self.socket = listen_on(settings.host, settings.port)

    def __enter__(self) -> "_Desk":
        return self

    def __exit__(self, *_: Any) -> None:
        self.socket.close()

    def serve(self, parallel: Any, runner: Any, group: Any, answer: TextIO) -> None:
        """Until drained. Clients get an answer or an error, whatever ends it."""
        from ..serve.api import Api, build_app
        from ..serve.blocks import BlockAllocator
        from ..serve.engine import Engine
        from ..serve.frontend import Frontend
        from ..serve.http import HttpThread
        from ..serve.metrics import Metrics
        from ..serve.scheduler import Scheduler

        s = self.settings
        blocks = BlockAllocator(s.num_blocks, s.block_size)
        scheduler = Scheduler(blocks, max_num_seqs=s.max_num_seqs, max_num_batched_tokens=s.max_num_batched_tokens)
        metrics = Metrics()
        frontend = Frontend(SimpleQueue(), s.max_in_flight, metrics)
        beat_s = min(2.0, group.timeout_s / 4)
        engine = Engine(
            scheduler, runner, group.channel, frontend.inbox, frontend.post,
            beat_s=beat_s, timeout_s=group.timeout_s, check=lambda: http.check(),
        )  # fmt: skip
        metrics.add_engine(scheduler, engine)
        stalled_s = group.timeout_s

        def trouble() -> str | None:
            silent = time.monotonic() - engine.last_beat
            return f"no step for {silent:.0f} s" if silent > stalled_s else None

        api = Api(s, self.served, frontend, trouble=trouble, more_metrics=lambda: _fusion_metrics(parallel))
        http = HttpThread(build_app(api), self.socket, s.max_in_flight, frontend.attach)
        _drain_on_signals(frontend, s.drain_seconds, alone=not started_as_rank())
        sys.setswitchinterval(_SWITCH_S)
        reason = "the server has shut down"
        try:
            http.start()
            self._say_ready(parallel, answer)
            engine.run()
        except Exception as error:
            reason = f"the server is going down: {error}"
            raise
        finally:
            frontend.close_soon(reason)
            http.stop()

    def _say_ready(self, parallel: Any, answer: TextIO) -> None:
        s, (host, port) = self.settings, self.socket.getsockname()[:2]
        if s.api_key is None and not _is_loopback(host):
            log.warning("%s can be reached from outside and no --api-key is asked: anybody may use this server", host)
        shown = f"[{host}]" if self.socket.family == socket.AF_INET6 else host
        decision = parallel.tp.explain([1, self.hidden_size]) if parallel.tp.world_size > 1 else None
        with contextlib.suppress(BrokenPipeError):
            answer.write(f"ready: {s.model_name} at http://{shown}:{port}/v1; {decision or 'no sums to fuse'}\n")
            answer.flush()


@contextlib.contextmanager
def _sigterm_later() -> Iterator[None]:
    """Around the import of Paddle, which must not be left in the middle, and which takes the handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        leave_on_sigterm()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _make_sampler(temperature: float, top_p: float, seed: int) -> Any:
    from fastdeploy_fusion.models.sampling import Sampler, SamplingParams

    return Sampler(SamplingParams(temperature=temperature, top_p=top_p), seed, 0)


def _drain_on_signals(frontend: Any, seconds: float, *, alone: bool) -> None:
    """The first signal: drain. Another: end at once.

    With other ranks a second SIGTERM may be the same request, by way of the launcher, and the launcher ends all at once
    where it must; a second SIGINT is a user's, and then all ranks stop at the next step.
    """
    times = 0

    def drain(number: int, frame: Any) -> None:
        nonlocal times
        times += alone or number == signal.SIGINT
        if times > 1 and alone:
            leave(number, frame)
        frontend.drain(0.0 if times > 1 else seconds)

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGINT, drain)


def _fusion_metrics(parallel: Any) -> str:
    from ..metrics import prometheus_text

    for _ in range(20):
        # The engine may count a new kind of call while this reads.
        with contextlib.suppress(RuntimeError):
            return prometheus_text(parallel.tp, parallel.moe)
    return ""


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return False
