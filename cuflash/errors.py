"""The exceptions cuflash raises; each message names the argument, its value, the limit and the remedy."""


class CuflashError(Exception):
    """Base class of everything cuflash raises on purpose."""


class ArgumentError(CuflashError, ValueError):
    """An argument has a value, dtype or device that the call cannot take."""


class ShapeError(ArgumentError):
    """An array's shape does not fit the others."""


class UnsupportedError(CuflashError, NotImplementedError):
    """No backend offers the combination asked for; the message lists what each of them lacks."""


class VersionError(CuflashError, ImportError):
    """A library that was asked for is absent, or of a version that cuflash does not work with."""


class CompileError(CuflashError, RuntimeError):
    """A CUDA source did not compile; `variant`, `log` and `source` hold the details."""

    def __init__(self, message: str, *, variant: str = "", log: str = "", source: str = "") -> None:
        super().__init__(message)
        self.variant = variant
        self.log = log
        self.source = source
