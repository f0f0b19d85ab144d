"""Every exception looptrt raises on purpose.

Expected shortage (no free unit, queue empty) is a value, never an exception.
"""


class LooptrtError(Exception):
    """Base of all errors raised by looptrt."""


class CheckpointError(LooptrtError):
    """A checkpoint cannot be used as it is; names the file and tensor."""


class BuildError(LooptrtError):
    """The build was asked for something that cannot be built."""


class ManifestError(LooptrtError):
    """An engine directory is damaged, incomplete or of another version."""


class PluginError(LooptrtError):
    """A plugin operator was called with operands that it cannot serve."""


class RequestError(LooptrtError):
    """The caller's request is invalid; nothing was queued."""


class QueueFullError(RequestError):
    """The waiting queue is full; the same request may be sent again later."""


class TransferError(LooptrtError):
    """A KV transfer failed.

    Attributes:
        retryable: whether the same transfer may be tried again.
    """

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class EngineError(LooptrtError):
    """The engine cannot go on: start-up failed, its process died or a deadline passed."""


class InvariantError(LooptrtError):
    """A rule of the KV memory or the scheduler was broken: a bug in looptrt."""
