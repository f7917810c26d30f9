"""cuflash: exact FlashAttention, forward and backward, for NumPy-style arrays."""

from cuflash.api import (
    attention,
    attention_backward,
    attention_hvp,
    attention_jvp,
    attention_statistics,
    attention_varlen,
    attention_varlen_backward,
    attention_varlen_vjp,
    attention_vjp,
    explain,
    explain_varlen,
)
from cuflash.decode import attention_decode, explain_decode
from cuflash.errors import ArgumentError, CompileError, CuflashError, ShapeError, UnsupportedError, VersionError
from cuflash.explanation import Explanation
from cuflash.inspection import attention_weights
from cuflash.modifiers import (
    ALiBi,
    BlockMask,
    CudaFunction,
    Documents,
    Dropout,
    KeyLengths,
    MaskModifier,
    ScoreModifier,
    Sinks,
)
from cuflash.modifiers.dropout import dropout_mask
from cuflash.picture import draw_attention, draw_costs, draw_recurrence, draw_tiles
from cuflash.statistics import Statistics
from cuflash.union import merge, merge_backward, merge_vjp

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "ArgumentError",
    "BlockMask",
    "CompileError",
    "CudaFunction",
    "CuflashError",
    "Documents",
    "Dropout",
    "Explanation",
    "KeyLengths",
    "MaskModifier",
    "ScoreModifier",
    "ShapeError",
    "Sinks",
    "Statistics",
    "UnsupportedError",
    "VersionError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_hvp",
    "attention_jvp",
    "attention_statistics",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_varlen_vjp",
    "attention_vjp",
    "attention_weights",
    "draw_attention",
    "draw_costs",
    "draw_recurrence",
    "draw_tiles",
    "dropout_mask",
    "explain",
    "explain_decode",
    "explain_varlen",
    "merge",
    "merge_backward",
    "merge_vjp",
]
