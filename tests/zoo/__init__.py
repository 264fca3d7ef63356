"""Tasks that are broken, healthy, or built around public models.

Import this package before transformers or timm: they import torchvision, which needs help beside some builds of torch.
"""

from zoo.torchvision_ops import declare_missing

_DECLARED = declare_missing()

# What takes seconds to import of transformers and timm: for `pool.preload`, in the files that need it.
SLOW_TO_IMPORT = ("transformers.models.gpt2.modeling_gpt2", "timm")
