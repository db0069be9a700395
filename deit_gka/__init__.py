"""GKA vision transformers on timm.

Importing this package (not gka) registers deit_{tiny,small,base}_{gka,vlt}[_distilled]_patch16_224 with timm, and lets
`attn_layer=` of any timm ViT be "gka"; `attention_by_layer` does it for a pattern by layer such as "GGGA".
`attention_maps` gives W of every layer, of timm's own ViTs too.
"""

from trainkit_gka import importing
from trainkit_gka.extras import require

importing(__name__)
require(__name__, "vision", "numpy", "safetensors", "rich", "tyro", "torchvision", "timm")

from deit_gka.figures.maps import LayerMaps as LayerMaps  # noqa: E402
from deit_gka.figures.maps import attention_maps as attention_maps  # noqa: E402
from deit_gka.model import registry as registry  # noqa: E402 - registers
from deit_gka.model.registry import attention_by_layer as attention_by_layer  # noqa: E402
