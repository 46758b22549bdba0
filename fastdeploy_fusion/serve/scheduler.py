"""Continuous batching: what each step runs. Pure; only the first rank schedules, all ranks run its plans."""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from .blocks import BlockAllocator


class Sampler(Protocol):
    def choose(self, logits: Any) -> int: ...


@dataclass(eq=False)
class Sequence:
    """One request's tokens. ``eos``: tokens that end it and are no part of it.

    The scheduler's own: ``slot`` and ``blocks`` while it runs; ``num_cached`` tokens of ``prompt + generated`` have
    their keys and values in the cache.
    """

    id: int
    prompt: list[int]
    max_tokens: int
    eos: frozenset[int]
    sampler: Sampler
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    generated: list[int] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        """Tokens to be run before the next one can be chosen."""
        return len(self.prompt) + len(self.generated) - self.num_cached

    def pending(self, count: int) -> list[int]:
        start = self.num_cached
        if start < len(self.prompt):
            return self.prompt[start : start + count]
        return self.generated[start - len(self.prompt) :][:count]


@dataclass(frozen=True)
class Plan:
    """One step, as every rank runs it; JSON-able, and all that ranks beside the first know of requests.

    tables: ``[slot, blocks]`` of sequences that start. slots, cached, lengths: as ``PackedBatch``. tokens: the packed
    token ids. rows: those whose logits are wanted.
    """

    slots: tuple[int, ...]
    cached: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    tables: tuple[tuple[int, list[int]], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return vars(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Plan":
        tables = tuple((slot, blocks) for slot, blocks in values["tables"])
        return cls(tables=tables, **{name: tuple(value) for name, value in values.items() if name != "tables"})


@dataclass(frozen=True)
class Event:
    """What a step did to one request: a token (None where an end token came), and why it ended, if it did."""

    id: int
    token: int | None
    finish_reason: str | None


class Scheduler:
    """Sequences that wait, in the order they came, and those that run.

    A sequence starts when a slot is free and there are blocks for its prompt and all of its ``max_tokens``; so what
    runs always ends without having to give way. The order is kept: nobody is overtaken by a smaller one.
    """

    def __init__(self, blocks: BlockAllocator, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks, self.max_num_batched_tokens = blocks, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._slots = list(range(max_num_seqs))

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """ValueError if it could never run."""
        total = len(sequence.prompt) + sequence.max_tokens
        if not sequence.prompt or sequence.max_tokens < 1:
            raise ValueError("a sequence needs a prompt and at least one token to generate")
        if self.blocks.blocks_for(total) > self.blocks.num_blocks:
            raise ValueError(f"{total} tokens never fit a cache of {self.blocks.num_blocks} blocks")
        self.waiting.append(sequence)

    def cancel(self, id: int) -> bool:
        """Forget a sequence and free what it holds; False when there is none of that id (any more)."""
        for sequence in self.running:
            if sequence.id == id:
                self._release(sequence)
                return True
        for sequence in self.waiting:
            if sequence.id == id:
                self.waiting.remove(sequence)
                return True
        return False

    def plan(self) -> tuple[Plan, list[Sequence]] | None:
        """The next step and its sequences in the order of ``plan.slots``; None when there is nothing to run."""
        started = self._admit()
        shares = self._share()
        if not shares:
            return None
        rows, end = [], 0
        for sequence, count in shares:
            end += count
            if count == sequence.num_pending:
                rows.append(end - 1)
        plan = Plan(
            slots=tuple(s.slot for s, _ in shares),
            cached=tuple(s.num_cached for s, _ in shares),
            lengths=tuple(count for _, count in shares),
            tokens=tuple(token for s, count in shares for token in s.pending(count)),
            rows=tuple(rows),
            tables=tuple((s.slot, s.blocks) for s in started),
        )
        return plan, [s for s, _ in shares]

    def commit(self, plan: Plan, sequences: list[Sequence], logits: Any) -> list[Event]:
        """Take over a step's result: ``logits`` has a row for each of ``plan.rows``. What has ended is released."""
        rows, events = iter(logits if plan.rows else ()), []
        for sequence, count in zip(sequences, plan.lengths, strict=True):
            sequence.num_cached += count
            if sequence.num_pending == 0:
                events.append(self._accept(sequence, sequence.sampler.choose(next(rows))))
        return events

    def _accept(self, sequence: Sequence, token: int) -> Event:
        if token in sequence.eos:
            self._release(sequence)
            return Event(sequence.id, None, "stop")
        sequence.generated.append(token)
        if len(sequence.generated) < sequence.max_tokens:
            return Event(sequence.id, token, None)
        self._release(sequence)
        return Event(sequence.id, token, "length")

    def _admit(self) -> list[Sequence]:
        started: list[Sequence] = []
        while self.waiting and self._slots:
            first = self.waiting[0]
            blocks = self.blocks.take(len(first.prompt) + first.max_tokens)
            if blocks is None:
                break
            first.slot, first.blocks = heapq.heappop(self._slots), blocks
            started.append(self.waiting.popleft())
        self.running += started
        return started

    def _share(self) -> list[tuple[Sequence, int]]:
        """Sequences of the next step and how many tokens of each.

        Answers that are under way get their token first. What is left is shared evenly among prompts, so that a short
        one is not held up by a long one. Answers of similar length lie side by side, to be attended in one go.
        """
        decoding = sorted((s for s in self.running if s.num_pending == 1), key=lambda s: s.num_cached)
        prompts = sorted((s for s in self.running if s.num_pending > 1), key=lambda s: s.num_pending)
        left = self.max_num_batched_tokens - len(decoding)
        shares = [(s, 1) for s in decoding]
        for i, sequence in enumerate(prompts):
            count = min(sequence.num_pending, -(-left // (len(prompts) - i)))
            if count > 0:
                shares.append((sequence, count))
                left -= count
        return shares

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.give_back(sequence.blocks)
        heapq.heappush(self._slots, sequence.slot)
        sequence.blocks = []
