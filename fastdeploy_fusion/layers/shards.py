"""How sizes are split over ranks; every rule is checked when a layer is built."""

from dataclasses import dataclass


def split_evenly(total: int, num_shards: int, what: str, setting: str = "tensor_parallel_size") -> int:
    """``total / num_shards``; ValueError when it does not divide."""
    if total <= 0:
        raise ValueError(f"{what} is {total}; it must be positive")
    if total % num_shards:
        raise ValueError(
            f"{what} {total} is not divisible by {setting} {num_shards}; "
            f"choose a divisor of {total}: {_divisors(total)}"
        )
    return total // num_shards


def shard_slice(total: int, rank: int, num_shards: int, what: str, setting: str = "tensor_parallel_size") -> slice:
    """This rank's part of an axis of ``total``, in rank order."""
    local = split_evenly(total, num_shards, what, setting)
    return slice(rank * local, (rank + 1) * local)


@dataclass(frozen=True)
class HeadSplit:
    """Attention heads of one rank. ``q`` and ``kv`` are its heads among all; kv heads repeat when they are few."""

    q: slice
    kv: slice

    @property
    def local_heads(self) -> int:
        return self.q.stop - self.q.start

    @property
    def local_kv_heads(self) -> int:
        return self.kv.stop - self.kv.start


def split_heads(total_heads: int, total_kv_heads: int, rank: int, num_shards: int) -> HeadSplit:
    """Split query heads evenly, and kv heads evenly or each over ``num_shards / total_kv_heads`` ranks."""
    if total_kv_heads <= 0 or total_heads <= 0 or total_heads % total_kv_heads:
        raise ValueError(
            f"num_attention_heads {total_heads} is not a positive multiple of num_key_value_heads {total_kv_heads}; "
            "correct the model's config"
        )
    if num_shards > total_heads:
        raise ValueError(
            f"tensor_parallel_size {num_shards} is larger than num_attention_heads {total_heads}; "
            f"choose a divisor of {total_heads}: {_divisors(total_heads)}"
        )
    q = shard_slice(total_heads, rank, num_shards, "num_attention_heads")
    if total_kv_heads % num_shards == 0:
        return HeadSplit(q, shard_slice(total_kv_heads, rank, num_shards, "num_key_value_heads"))
    if num_shards % total_kv_heads:
        fitting = [n for n in range(1, total_heads + 1) if total_heads % n == 0]
        fitting = [n for n in fitting if total_kv_heads % n == 0 or n % total_kv_heads == 0]
        raise ValueError(
            f"num_key_value_heads {total_kv_heads} is neither a multiple nor a divisor of tensor_parallel_size "
            f"{num_shards}; choose one of {fitting}"
        )
    head = rank // (num_shards // total_kv_heads)
    return HeadSplit(q, slice(head, head + 1))


@dataclass(frozen=True)
class MambaSplit:
    """What one rank computes of a Mamba2 mixer: whole ``groups``, and the ``heads`` that use them, among all.

    ``own_columns``: which of its heads' elements are this rank's to multiply by ``out_proj``. All of them, unless ranks
    share a group.
    """

    groups: slice
    heads: slice
    head_dim: int
    own_columns: slice

    @property
    def num_groups(self) -> int:
        return self.groups.stop - self.groups.start

    @property
    def num_heads(self) -> int:
        return self.heads.stop - self.heads.start

    @property
    def inner(self) -> slice:
        """Elements of its heads."""
        return slice(self.heads.start * self.head_dim, self.heads.stop * self.head_dim)

    def states(self, state_size: int) -> slice:
        """Elements of its groups' ``B`` or ``C``."""
        return slice(self.groups.start * state_size, self.groups.stop * state_size)


def split_mamba(num_heads: int, head_dim: int, n_groups: int, rank: int, num_shards: int) -> MambaSplit:
    """Split groups evenly, or each over ``num_shards / n_groups`` ranks."""
    if n_groups <= 0 or num_heads <= 0 or num_heads % n_groups:
        raise ValueError(
            f"mamba_num_heads {num_heads} is not a positive multiple of n_groups {n_groups}; correct the model's config"
        )
    inner = num_heads * head_dim
    own = shard_slice(inner, rank, num_shards, "mamba_num_heads * mamba_head_dim")
    if n_groups % num_shards and num_shards % n_groups:
        fitting = [n for n in range(1, inner + 1) if not inner % n and not (n_groups % n and n % n_groups)]
        raise ValueError(
            f"n_groups {n_groups} is neither a multiple nor a divisor of tensor_parallel_size {num_shards}; "
            f"choose one of {fitting[:16]}"
        )
    sharing = max(1, num_shards // n_groups)
    groups = shard_slice(n_groups, rank // sharing, num_shards // sharing, "n_groups")
    per_group = num_heads // n_groups
    heads = slice(groups.start * per_group, groups.stop * per_group)
    first = heads.start * head_dim
    return MambaSplit(groups, heads, head_dim, slice(own.start - first, own.stop - first))


def _divisors(total: int) -> str:
    small = [n for n in range(1, min(total, 64) + 1) if total % n == 0]
    return ", ".join(map(str, small))
