"""The modifiers: one file each.  `REGISTRY` maps the name that a compiled variant carries to its class."""

from cuflash.modifiers.alibi import ALiBi
from cuflash.modifiers.base import Modifier, Tile
from cuflash.modifiers.bias import Bias
from cuflash.modifiers.causal import Causal
from cuflash.modifiers.lengths import KeyLengths
from cuflash.modifiers.mask import Mask
from cuflash.modifiers.scaled import Scaled
from cuflash.modifiers.softcap import Softcap
from cuflash.modifiers.window import Window

REGISTRY: dict[str, type[Modifier]] = {
    m.name: m for m in (Scaled, Softcap, ALiBi, Bias, Causal, Window, KeyLengths, Mask)
}

__all__ = [
    "REGISTRY",
    "ALiBi",
    "Bias",
    "Causal",
    "KeyLengths",
    "Mask",
    "Modifier",
    "Scaled",
    "Softcap",
    "Tile",
    "Window",
]
