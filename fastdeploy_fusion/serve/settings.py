"""What a server is told: frozen, checked when made, one home for each default."""

from dataclasses import dataclass

from ..config import check_positive


@dataclass(frozen=True)
class ServeSettings:
    """Limits and addresses of one server.

    host, port: where it listens; port 0 takes a free one.
    kv_cache_tokens: tokens whose keys and values are kept at a time, of all sequences together.
    max_num_batched_tokens: tokens of one forward; longer prompts are read in pieces.
    max_num_seqs: sequences that run at a time. max_waiting: requests that may wait for that; more are answered 429.
    max_body_bytes: of a request. body_seconds: how long a request's body may take to come.
    drain_seconds: what running requests get after SIGTERM.
    api_key: what clients must send; None: nothing is asked.
    model_name: the model's name towards clients.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    kv_cache_tokens: int = 16384
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_waiting: int = 256
    max_body_bytes: int = 1 << 20
    body_seconds: float = 30.0
    drain_seconds: float = 30.0
    api_key: str | None = None
    model_name: str = "model"
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("kv_cache_tokens", "max_num_batched_tokens", "max_num_seqs", "max_body_bytes", "block_size"):
            check_positive(name, getattr(self, name))
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be 0 to 65535 (0 takes a free one)")
        if self.kv_cache_tokens < self.block_size:
            raise ValueError(
                f"kv_cache_tokens is {self.kv_cache_tokens}; it must be at least one block of {self.block_size}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens} and max_num_seqs {self.max_num_seqs}; every "
                "running sequence takes one token a step, so it must be at least as many"
            )
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("the API key is empty or holds characters that are not printable ASCII")

    @property
    def num_blocks(self) -> int:
        return self.kv_cache_tokens // self.block_size

    @property
    def max_in_flight(self) -> int:
        """Requests that are accepted at a time."""
        return self.max_num_seqs + self.max_waiting
