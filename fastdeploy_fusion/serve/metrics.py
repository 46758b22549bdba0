"""Counters of one server as Prometheus text. Written by the event loop's thread alone."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from .engine import Engine
from .scheduler import Scheduler

_RATE_S = 10.0


class Total:
    """A counter, by labels given as a tuple of values."""

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> None:
        self.name, self.meaning, self.labels = name, meaning, labels
        self.values: Counter[tuple[str, ...]] = Counter() if labels else Counter({(): 0})

    def add(self, amount: int = 1, labels: tuple[str, ...] = ()) -> None:
        self.values[labels] += amount

    def lines(self) -> Iterable[str]:
        yield from _head(self.name, "counter", self.meaning)
        for values, amount in sorted(self.values.items()):
            yield f"{self.name}{_braces(zip(self.labels, values, strict=True))} {amount}"


class Histogram:
    def __init__(self, name: str, meaning: str, bounds: tuple[float, ...]) -> None:
        self.name, self.meaning, self.bounds = name, meaning, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[next((i for i, bound in enumerate(self.bounds) if value <= bound), len(self.bounds))] += 1
        self.sum += value

    def lines(self) -> Iterable[str]:
        yield from _head(self.name, "histogram", self.meaning)
        total = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {self.sum:.6f}"
        yield f"{self.name}_count {total}"


class Gauge:
    """Read when it is asked for."""

    def __init__(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        self.name, self.meaning, self.read = name, meaning, read

    def lines(self) -> Iterable[str]:
        yield from _head(self.name, "gauge", self.meaning)
        value = self.read()
        yield f"{self.name} {int(value) if value == int(value) else value}"  # every digit of large counts


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    def __init__(self) -> None:
        self.requests = Total("fdfusion_requests_total", "Answered requests.", ("endpoint", "status"))
        self.disconnects = Total("fdfusion_client_disconnects_total", "Requests whose client left before the end.")
        self.prompt_tokens = Total("fdfusion_prompt_tokens_total", "Tokens of accepted prompts.")
        self.new_tokens = Total("fdfusion_generated_tokens_total", "Tokens generated.")
        self.first_token = Histogram(
            "fdfusion_time_to_first_token_seconds", "From a request's acceptance to its first token.", _SECONDS
        )
        self.between_tokens = Histogram(
            "fdfusion_time_between_tokens_seconds", "Between a request's tokens after the first.", _SHORT
        )
        self.latency = Histogram("fdfusion_request_seconds", "From a request's acceptance to its last token.", _SECONDS)
        self.gauges = [Gauge("fdfusion_tokens_per_second", "Generated in the last 10 s.", self.rate)]
        self._recent: deque[list[float]] = deque()  # [second, tokens]

    def add_engine(self, scheduler: Scheduler, engine: Engine) -> None:
        """Read from another thread than theirs: lengths and counts, each of one moment."""
        blocks = scheduler.blocks
        size = blocks.block_size
        for name, meaning, read in (
            ("requests_running", "Sequences that run.", lambda: len(scheduler.running)),
            ("requests_waiting", "Sequences that wait for room.", lambda: len(scheduler.waiting)),
            (
                "kv_tokens_used",
                "Tokens of the KV cache that sequences hold.",
                lambda: blocks.num_used * size,
            ),
            ("kv_tokens", "Tokens of the whole KV cache.", lambda: blocks.num_blocks * size),
            ("engine_steps", "Steps run since the start.", lambda: engine.num_steps),
        ):
            self.gauges.append(Gauge(f"fdfusion_{name}", meaning, read))

    def answered(self, endpoint: str, status: int | None) -> None:
        """None: the client left before the answer's end, whatever it got of it."""
        if status is None:
            self.disconnects.add()
        self.requests.add(1, (endpoint, str(status or 499)))

    def token(self, now: float, before: float, *, is_first: bool) -> None:
        self.new_tokens.add()
        (self.first_token if is_first else self.between_tokens).observe(now - before)
        if self._recent and now - self._recent[-1][0] < 0.1:
            self._recent[-1][1] += 1
        else:
            self._recent.append([now, 1])
            self._forget(now)

    def rate(self) -> float:
        self._forget(time.monotonic())
        return sum(count for _, count in self._recent) / _RATE_S

    def _forget(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > _RATE_S:
            self._recent.popleft()

    def text(self) -> str:
        families: tuple[Total | Histogram | Gauge, ...] = (
            self.requests,
            self.disconnects,
            self.prompt_tokens,
            self.new_tokens,
            self.first_token,
            self.between_tokens,
            self.latency,
            *self.gauges,
        )
        return "".join(line + "\n" for family in families for line in family.lines())


def _head(name: str, kind: str, meaning: str) -> Iterable[str]:
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {kind}"


def _braces(labels: Iterable[tuple[str, str]]) -> str:
    text = ",".join(f'{name}="{value}"' for name, value in labels)
    return f"{{{text}}}" if text else ""
