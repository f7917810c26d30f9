"""The modifiers: one file each.  `REGISTRY` maps the name that a compiled variant carries to its class."""

from cuflash.modifiers.alibi import ALiBi
from cuflash.modifiers.base import Modifier, Tile
from cuflash.modifiers.bias import Bias
from cuflash.modifiers.blocks import BlockMask
from cuflash.modifiers.causal import Causal
from cuflash.modifiers.documents import Documents
from cuflash.modifiers.dropout import Dropout
from cuflash.modifiers.lengths import KeyLengths
from cuflash.modifiers.mask import Mask
from cuflash.modifiers.packed import Packed
from cuflash.modifiers.scaled import Scaled
from cuflash.modifiers.sinks import Sinks
from cuflash.modifiers.softcap import Softcap
from cuflash.modifiers.window import Window

REGISTRY: dict[str, type[Modifier]] = {
    m.name: m
    for m in (
        Scaled,
        Softcap,
        ALiBi,
        Bias,
        Causal,
        Window,
        KeyLengths,
        Mask,
        Documents,
        BlockMask,
        Packed,
        Sinks,
        Dropout,
    )
}

__all__ = [
    "REGISTRY",
    "ALiBi",
    "Bias",
    "BlockMask",
    "Causal",
    "Documents",
    "Dropout",
    "KeyLengths",
    "Mask",
    "Modifier",
    "Packed",
    "Scaled",
    "Sinks",
    "Softcap",
    "Tile",
    "Window",
]
