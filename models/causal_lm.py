"""What all models here share: embedding, a stack of decoder layers, final norm, head, and one forward over them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paddle import nn

from fastdeploy_fusion.layers import (
    AttentionStep,
    ContextSplit,
    DecoderLayer,
    KVCache,
    PackedBatch,
    PagedKVCache,
    PageTable,
    ParallelLMHead,
    PipelineStage,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
    WeightedLayer,
)

from .config import ModelConfig

if TYPE_CHECKING:
    from fastdeploy_fusion.parallel import Parallel


class CausalLM(WeightedLayer):
    """One rank's part of a model: its stage's layers, its shards of them. All ranks call every method alike.

    A model says how a layer is made (``make_layer``) and, where they differ, its names in the checkpoint, its rotary
    embedding and what it caches.
    """

    takes_layout = True
    embed_prefix = "model.embed_tokens"
    layers_prefix = "model.layers"
    norm_prefix = "model.norm"

    def __init__(self, config: ModelConfig, parallel: "Parallel", dtype: str = "float32") -> None:
        super().__init__()
        self.config, self.parallel, self.tp, self.dtype = config, parallel, parallel.tp, dtype
        self.stage = PipelineStage(parallel, config.num_hidden_layers)
        vocab_size, size, tied = config.vocab_size, config.hidden_size, config.tie_word_embeddings
        shared: dict[str, Any] = {"tp": parallel.tp, "dtype": dtype}
        if self.stage.is_first or (self.stage.is_last and tied):
            self.embed_tokens = VocabParallelEmbedding(vocab_size, size, prefix=self.embed_prefix, **shared)
        self.layers = nn.LayerList([self.make_layer(i, f"{self.layers_prefix}.{i}") for i in self.stage.layers])
        if self.stage.is_last:
            self.norm = RMSNorm(size, config.rms_norm_eps, prefix=self.norm_prefix, **shared)
            tied_to = self.embed_tokens if tied else None
            self.lm_head = ParallelLMHead(vocab_size, size, prefix="lm_head", tied_to=tied_to, **shared)
        self.tied_head_key = "lm_head.weight" if tied else None
        self.rotary = self.make_rotary()

    def make_layer(self, layer_id: int, prefix: str) -> WeightedLayer:
        """One decoder layer: ``forward(hidden, residual, step, taps) -> (hidden, residual)``, as ``DecoderLayer``."""
        raise NotImplementedError

    def frame(self, layer_id: int, prefix: str, attention: WeightedLayer, mlp: WeightedLayer) -> DecoderLayer:
        """A decoder layer of attention and feed-forward block, with its two norms."""
        return DecoderLayer(
            self.config.hidden_size,
            self.config.rms_norm_eps,
            attention,
            mlp,
            tp=self.tp,
            prefix=prefix,
            layer_id=layer_id,
            dtype=self.dtype,
        )

    def make_rotary(self) -> RotaryEmbedding | None:
        """How queries and keys are rotated; None: not at all."""
        c = self.config
        return RotaryEmbedding(c.rotary_dim, c.rope_theta, interleaved=c.rope_interleaved, yarn=c.yarn)

    def new_cache(self, num_slots: int, max_tokens: int) -> Any:
        """An empty cache for ``num_slots`` sequences of up to ``max_tokens`` on this rank."""
        return self.cache_around(KVCache(num_slots=num_slots, max_tokens=max_tokens, **self.kv_sizes()), num_slots)

    def new_paged_cache(self, pages: PageTable) -> Any:
        """An empty cache whose sequences lie where ``pages`` says."""
        return self.cache_around(PagedKVCache(pages, **self.kv_sizes()), pages.num_slots)

    def kv_sizes(self) -> dict[str, Any]:
        """What this rank keeps of a token's keys and values: arguments of ``KVCache``."""
        attention = self.layers[0].self_attn
        sizes = {"kv_heads": attention.kv_heads, "head_dim": self.config.head_dim}
        return {"layers": self.stage.layers, "dtype": self.dtype, **sizes}

    def cache_around(self, kv: KVCache, num_slots: int) -> Any:
        """The whole cache, where keys and values are not all that it keeps of ``num_slots`` sequences."""
        return kv

    def new_step(self, batch: PackedBatch, cache: Any, split: ContextSplit) -> Any:
        """What the layers of one forward share about the batch."""
        return AttentionStep(batch, cache, self.rotary, split)

    def forward(
        self,
        token_ids: Any,
        batch: PackedBatch,
        cache: Any,
        *,
        aux_layer_ids: Sequence[int] | None = None,
        exit_layer: int | None = None,
    ) -> Any:
        """``token_ids [num_tokens]`` int64, packed as ``batch`` says, to normalised states ``[num_tokens, hidden]``.

        What the batch's tokens leave to later ones is in ``cache`` afterwards. Stages before the last return None.

        Args:
            aux_layer_ids: also return the residual streams before these layers, as draft models read them: complete
                tensors ``[num_tokens, hidden]``, equal on all ranks. 0 is the embedding; the number of layers that run,
                the stream before the final norm. The result is then ``(states, [streams, in ascending order])``.
            exit_layer: run only so many layers, then the final norm.
        """
        wanted, layers = self._check_layers(aux_layer_ids, exit_layer)
        split = ContextSplit(batch, self.parallel.context)
        step = self.new_step(batch, cache, split)
        if self.stage.is_first:
            hidden = self.embed_tokens(split.take(token_ids))
        else:
            hidden = self.stage.receive([split.local.num_tokens, self.config.hidden_size], self.dtype)
        residual, taps = None, []
        for i, layer in enumerate(layers):
            hidden, residual = layer(hidden, residual, step, taps if i in wanted else None)
        if not self.stage.is_last:
            self.stage.send(hidden, residual)
            return None
        states, stream = self.norm(hidden, residual)
        if len(layers) in wanted:
            taps.append(stream)
        return split.gather(states) if aux_layer_ids is None else (split.gather(states), [*map(split.gather, taps)])

    def logits(self, hidden: Any) -> Any:
        """float32 ``[rows, vocab_size]`` for rows of ``forward``'s result, the same bytes on every rank."""
        return self.lm_head(hidden)

    def _check_layers(self, aux_layer_ids: Sequence[int] | None, exit_layer: int | None) -> tuple[set[int], Any]:
        """The streams to return, and the layers to run."""
        if aux_layer_ids is None and exit_layer is None:
            return set(), self.layers
        if not (self.stage.is_first and self.stage.is_last):
            raise ValueError("aux_layer_ids and exit_layer need all layers on one stage; set pipeline_parallel_size 1")
        last = len(self.layers) if exit_layer is None else exit_layer
        if not 1 <= last <= len(self.layers):
            raise ValueError(f"exit_layer is {exit_layer}; it must be 1 to {len(self.layers)}, the model's layers")
        wanted = set(aux_layer_ids or ())
        if wanted and not 0 <= min(wanted) <= max(wanted) <= last:
            raise ValueError(f"aux_layer_ids {sorted(wanted)} are not all within 0 to {last}, the layers that run")
        return wanted, list(self.layers)[:last]
