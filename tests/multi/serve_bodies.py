"""What test_serve_batching.py runs on the ranks: the engine with a real model, without HTTP."""

import random
from queue import SimpleQueue

from fastdeploy_fusion import FusionConfig, ParallelConfig, models
from fastdeploy_fusion.models.sampling import Sampler
from fastdeploy_fusion.parallel import Parallel
from fastdeploy_fusion.serve.blocks import BlockAllocator
from fastdeploy_fusion.serve.engine import Engine, follow
from fastdeploy_fusion.serve.scheduler import Scheduler, Sequence
from fastdeploy_fusion.serve.step import ModelRunner
from tests.references import load_reference

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS = 24, 8, 5
MAX_TOKENS, REPEATS = 12, 2


def batched_equals_alone(rank, num_ranks, folder, fused, layout):
    """``[tokens batched, tokens alone, paths taken]``: requests join and leave a busy engine whose budgets are so small
    that prompts are read in pieces and sequences wait; alone, ``generate`` gets one prompt at a time."""
    prompts = load_reference(folder)[0]
    hidden_size = models.load_config(folder).hidden_size
    config = ParallelConfig(**layout)
    with Parallel.open(config, FusionConfig(enabled=fused), hidden_size=hidden_size) as parallel:
        model = models.load_model(folder, parallel, progress=False)
        params = models.SamplingParams(max_new_tokens=MAX_TOKENS)
        alone = [models.generate(model, parallel, [prompt], params)[0].token_ids for prompt in prompts]
        runner = ModelRunner(model, num_slots=MAX_SEQS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        runner.warm_up()
        group = parallel.replica.fork()
        order = random.Random(5).sample(range(REPEATS * len(prompts)), REPEATS * len(prompts))
        batched = serve(rank, runner, group, model, [(i, prompts[i % len(prompts)]) for i in order])
        if num_ranks > 1:
            group.close()
        return [batched, alone * REPEATS, sorted({path for _, path, _ in parallel.counters})]


def serve(rank, runner, group, model, requests):
    """Tokens by request, in the order of their ids, on rank 0."""
    if rank != 0:
        follow(runner, group.channel, 20.0)
        return None
    scheduler = Scheduler(BlockAllocator(NUM_BLOCKS, BLOCK_SIZE), max_num_seqs=MAX_SEQS, max_num_batched_tokens=7)
    inbox, tokens, waiting = SimpleQueue(), {id: [] for id, _ in requests}, list(requests)
    eos = frozenset(model.config.eos_token_ids)

    def join():
        id, prompt = waiting.pop(0)
        sampler = Sampler(models.SamplingParams(), 0, 0)
        inbox.put(("add", Sequence(id, list(prompt), MAX_TOKENS, eos, sampler)))

    def deliver(events):
        for event in events:
            if event.token is not None:
                tokens[event.id].append(event.token)
            if waiting and (event.finish_reason or len(tokens[event.id]) % 5 == 0):
                join()
        if not waiting and inbox.empty() and not len(scheduler):
            inbox.put(("drain", 30.0))

    for _ in range(3):
        join()
    Engine(scheduler, runner, group.channel, inbox, deliver, beat_s=0.2, timeout_s=20.0).run()
    assert not waiting and scheduler.blocks.num_used == 0
    return [tokens[id] for id in sorted(tokens)]
