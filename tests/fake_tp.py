"""A stand-in for one rank of an open ``AllReduceFusion``: no peers, every owed sum recorded instead of reduced."""

import numpy as np
import paddle

from fastdeploy_fusion.layers.parameter import write_parameter
from fastdeploy_fusion.partial import PartialSum


class FakeGroup:
    def __init__(self, rank, size):
        self.rank, self.size, self.ranks = rank, size, tuple(range(size))

    def broadcast_object(self, value, root=0):
        return value

    def check_equal(self, value, what):
        pass


class FakeTp:
    """Rank ``rank`` of ``world_size``. ``all_reduce`` hands its operand back: the caller adds the ranks' shares."""

    def __init__(self, rank=0, world_size=1, defers=False):
        self.rank, self.world_size, self.group = rank, world_size, FakeGroup(rank, world_size)
        self.deferring = defers
        self.reduced, self.normed = [], []

    def defers(self, marked):
        return marked and self.deferring

    def partial(self, tensor, site=""):
        return PartialSum(tensor, self, site)

    def all_reduce(self, tensor, site=""):
        self.reduced.append(list(tensor.shape))
        return tensor

    def all_gather(self, tensor):
        return paddle.concat([tensor] * self.world_size, axis=-1)

    def add_rms_norm(self, partial, residual, weight, eps, weight_bias=0.0):
        self.normed.append((partial.take(), residual))
        return self.normed[-1]


def ranks(world_size, **options):
    return [FakeTp(rank, world_size, **options) for rank in range(world_size)]


def fill(layer, stored=None, seed=0):
    """Fill a layer as loading would, from ``stored`` (name -> float32 array); what is not there is drawn and put in it.

    Equal names and shapes get equal values whatever the rank.
    """
    stored = {} if stored is None else stored
    for spec in layer.checkpoint_tensors():
        if spec.key not in stored:
            draw = np.random.default_rng([seed, *spec.key.encode()])
            stored[spec.key] = draw.standard_normal(spec.shape).astype(np.float32) * 0.3
        assert stored[spec.key].shape == spec.shape, spec.key
        if spec.param is not None:
            write_parameter(spec.param, spec.dst, stored[spec.key][spec.src])
    return stored


def tensor(array, dtype="float32"):
    return paddle.to_tensor(np.asarray(array, np.float32)).astype(dtype)


def array(value):
    return value.astype("float32").numpy()


def draw(*shape, seed=1):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
