"""What can go wrong, by who has to act on it. Wrong arguments are plain ``ValueError`` and ``TypeError``."""


class FusionError(RuntimeError):
    """The library can't go on; the message says the value, the rule and the way out."""


class PeerLost(FusionError):
    """Another rank of the group died, never came, or brought something else; the message names it."""


class WorkspaceError(FusionError):
    """A workspace was used against its rules (closed, frozen, opened during graph capture)."""


class CheckpointError(FusionError, ValueError):
    """A checkpoint can't be read, or does not hold what the model needs; the message lists every difference."""
