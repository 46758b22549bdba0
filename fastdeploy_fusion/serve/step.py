"""One step on this rank: a plan's tokens through the model, with the paged cache."""

from typing import Any

import paddle

from ..layers import PackedBatch, PageTable, ops
from ..layers.pipeline import share_last
from .scheduler import Plan


class ModelRunner:
    """``model``: as ``models.load_model`` gives it. Equal sizes on all ranks."""

    def __init__(self, model: Any, *, num_slots: int, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.pages = PageTable(num_slots=num_slots, num_blocks=num_blocks, block_size=block_size)
        self.cache = model.new_paged_cache(self.pages)

    def run(self, plan: Plan) -> Any:
        """float32 ``[len(plan.rows), vocab_size]``, None without rows. Collective over the replica."""
        for slot, blocks in plan.tables:
            self.pages.assign(slot, blocks)
        batch = PackedBatch(plan.slots, plan.cached, plan.lengths)
        with paddle.no_grad():
            hidden = self.model(ops.tensor_of(plan.tokens), batch, self.cache)
            if not plan.rows:
                return None
            logits = None
            if hidden is not None:
                if len(plan.rows) < batch.num_tokens:
                    hidden = paddle.gather(hidden, ops.tensor_of(plan.rows, hidden.place))
                logits = self.model.logits(hidden)
            shape = [len(plan.rows), self.model.config.vocab_size]
            return share_last(self.model.parallel.pipeline, logits, shape, "float32").numpy()

    def warm_up(self) -> None:
        """One token and a short prompt in slot 0, so that the first request finds all kernels ready. Collective."""
        for length in (1, min(8, self.pages.block_size)):
            tokens = (0,) * length
            self.run(Plan((0,), (0,), (length,), tokens, (length - 1,), ((0, [0]),)))
