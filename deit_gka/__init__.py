"""GKA vision transformers on timm. Importing this package registers deit_{tiny,small,base}_{gka,vlt}_patch16_224 with timm."""

from deit_gka.model import registry as registry  # registers
