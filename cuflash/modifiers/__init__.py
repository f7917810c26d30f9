"""The modifiers: one file each.  `REGISTRY` maps the name that a compiled variant carries to its class."""

from cuflash.modifiers.alibi import ALiBi
from cuflash.modifiers.base import Modifier, Tile
from cuflash.modifiers.bias import Bias
from cuflash.modifiers.blocks import BlockMask
from cuflash.modifiers.causal import Causal
from cuflash.modifiers.documents import Documents
from cuflash.modifiers.dropout import Dropout
from cuflash.modifiers.function import CudaFunction
from cuflash.modifiers.lengths import KeyLengths
from cuflash.modifiers.mask import Mask
from cuflash.modifiers.packed import Packed
from cuflash.modifiers.scaled import Scaled
from cuflash.modifiers.scales import Scales
from cuflash.modifiers.sinks import Sinks
from cuflash.modifiers.softcap import Softcap
from cuflash.modifiers.window import Window
from cuflash.modifiers.written import CLASSES, MaskModifier, ScoreModifier, Written


class Registry(dict[str, type[Modifier]]):
    """Those of this folder, and behind them those that expressions made, as long as something has them."""

    def __missing__(self, name: str) -> type[Modifier]:
        return CLASSES[name]


REGISTRY: dict[str, type[Modifier]] = Registry(
    (m.name, m)
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
        Scales,
    )
)

__all__ = [
    "REGISTRY",
    "ALiBi",
    "Bias",
    "BlockMask",
    "Causal",
    "CudaFunction",
    "Documents",
    "Dropout",
    "KeyLengths",
    "Mask",
    "MaskModifier",
    "Modifier",
    "Packed",
    "Scaled",
    "Scales",
    "ScoreModifier",
    "Sinks",
    "Softcap",
    "Tile",
    "Window",
    "Written",
]
