"""What each step runs: who starts, whose turn it is, and that blocks and slots always come back."""

import json
import random
import time

import pytest

from fastdeploy_fusion.serve.blocks import BlockAllocator
from fastdeploy_fusion.serve.scheduler import Plan, Scheduler, Sequence


class Next:
    """Chooses what the row of "logits" holds."""

    def choose(self, row):
        return row


def scheduler(num_blocks=8, block_size=4, max_num_seqs=4, max_num_batched_tokens=16):
    blocks = BlockAllocator(num_blocks, block_size)
    return Scheduler(blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


def sequence(id, prompt_length, max_tokens=4, eos=()):
    return Sequence(id, [100 * id + i for i in range(prompt_length)], max_tokens, frozenset(eos), Next())


def step(s, token=7):
    """(lengths by id, events as tuples); every row gets ``token``."""
    plan, sequences = s.plan()
    events = s.commit(plan, sequences, [token] * len(plan.rows))
    lengths = {q.id: n for q, n in zip(sequences, plan.lengths, strict=True)}
    return lengths, [(e.id, e.token, e.finish_reason) for e in events]


def test_blocks_are_taken_all_or_none_lowest_first():
    blocks = BlockAllocator(4, 16)
    assert (blocks.take(17), blocks.take(16), blocks.take(17)) == ([0, 1], [2], None)
    blocks.give_back([0, 1])
    assert (blocks.take(49), blocks.take(32), blocks.num_used) == (None, [0, 1], 3)
    for wrong in ([3], [0, 0]):
        with pytest.raises(ValueError, match="twice"):
            blocks.give_back(wrong)


def test_giving_back_does_not_look_at_what_is_free():
    blocks = BlockAllocator(1_000_000, 16)
    taken = [blocks.take(16) for _ in range(1000)]
    begin = time.process_time()
    for some in taken:
        blocks.give_back(some)
    assert blocks.num_used == 0 and time.process_time() - begin < 0.5


def test_one_sequence_from_prompt_to_end():
    s = scheduler()
    s.add(sequence(1, 3, max_tokens=2))
    plan, sequences = s.plan()
    assert plan == Plan((0,), (0,), (3,), (100, 101, 102), (2,), ((0, [0, 1]),))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    s.commit(plan, sequences, [55])
    plan, sequences = s.plan()
    assert plan == Plan((0,), (3,), (1,), (55,), (0,), ())
    (event,) = s.commit(plan, sequences, [56])
    assert (event.token, event.finish_reason, len(s), s.blocks.num_used) == (56, "length", 0, 0)
    assert s.plan() is None


def test_an_end_token_ends_it_and_is_no_part_of_it():
    s = scheduler()
    s.add(sequence(1, 3, eos=[9]))
    assert step(s, 5)[1] == [(1, 5, None)]
    assert step(s, 9)[1] == [(1, None, "stop")]
    assert s.blocks.num_used == 0


def test_running_answers_come_first_and_prompts_share_what_is_left():
    s = scheduler(num_blocks=100, max_num_batched_tokens=10)
    s.add(sequence(1, 2))
    step(s)
    for id, length in ((2, 30), (3, 3), (4, 20)):
        s.add(sequence(id, length))
    lengths, events = step(s)
    assert lengths == {1: 1, 3: 3, 4: 3, 2: 3}  # the short prompt is read whole
    assert [e[0] for e in events] == [1, 3]
    lengths, _ = step(s)
    assert lengths == {1: 1, 3: 1, 4: 4, 2: 4}


def test_who_comes_first_starts_first_and_waits_for_room():
    s = scheduler(num_blocks=4)
    for id, length in ((1, 4), (2, 8), (3, 1)):
        s.add(sequence(id, length, max_tokens=4))
    assert step(s)[0] == {1: 4}  # 2 needs 3 blocks of the 2 left; 3 would fit and does not overtake
    assert [len(s.running), len(s.waiting)] == [1, 2]
    assert s.cancel(1) and not s.cancel(1)
    assert step(s)[0] == {2: 8}
    assert s.cancel(3) and len(s) == 1


def test_what_can_never_run_is_refused():
    s = scheduler()
    for wrong in (sequence(1, 29), sequence(1, 0), sequence(1, 1, max_tokens=0)):
        with pytest.raises(ValueError):
            s.add(wrong)
    s.add(sequence(1, 28))


def test_nothing_is_lost_and_nothing_leaks_whatever_comes():
    rng = random.Random(3)
    s = scheduler(num_blocks=20, block_size=4, max_num_seqs=6, max_num_batched_tokens=9)
    expected, done, cancelled, next_id = {}, {}, set(), 0
    for turn in range(3000):
        if rng.random() < 0.25 and turn < 2000:
            q = sequence(next_id, rng.randint(1, 40), rng.randint(1, 12), eos=[1])
            expected[next_id] = q
            s.add(q)
            next_id += 1
        if rng.random() < 0.03 and next_id:
            victim = rng.randrange(next_id)
            if s.cancel(victim):
                cancelled.add(victim)
        planned = s.plan()
        if planned is None:
            continue
        plan, sequences = planned
        assert sum(plan.lengths) == len(plan.tokens) <= 9
        assert len(set(plan.slots)) == len(plan.slots) and max(plan.slots) < 6
        held = [block for q in s.running for block in q.blocks]
        assert len(set(held)) == len(held) == s.blocks.num_used
        for q, cached, count in zip(sequences, plan.cached, plan.lengths, strict=True):
            assert cached + count <= len(q.blocks) * 4
        for event in s.commit(plan, sequences, [rng.randint(1, 30) for _ in plan.rows]):
            if event.finish_reason:
                done[event.id] = event.finish_reason
    assert len(s) == 0 and s.blocks.num_used == 0
    assert set(done) | cancelled == set(expected) and not set(done) & cancelled
    for id, reason in done.items():
        q = expected[id]
        assert (reason == "length") == (len(q.generated) == q.max_tokens) and len(q.generated) <= q.max_tokens
