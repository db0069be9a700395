"""Run inside a checkout of upstream DeiT.

python upstream_deit.py main FLAGS...          its main.py, without CUDA (where torch.cuda.synchronize raises)
python upstream_deit.py model OUT.safetensors  what its own softmax model computes, built past timm's registry
"""

import os
import runpy
import sys

sys.path.insert(0, os.getcwd())

import torch


def model(out: str) -> None:
    import models
    from safetensors.torch import save_file

    torch.manual_seed(1)
    net = models.deit_tiny_patch16_224(num_classes=10, img_size=64, drop_path_rate=0.1).train()
    tensors = {f"init.{name}": value.clone() for name, value in net.state_dict().items()}
    images, targets = torch.randn(4, 3, 64, 64), torch.arange(4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loss = torch.nn.functional.cross_entropy(net(images), targets)
    loss.backward()
    optimizer.step()
    tensors["logits"] = net.eval()(images).detach()
    save_file(tensors | {f"step.{name}": value.clone() for name, value in net.state_dict().items()}, out)


if __name__ == "__main__":
    if sys.argv[1] == "model":
        model(sys.argv[2])
    else:
        torch.cuda.synchronize = lambda *_: None
        sys.argv = ["main.py", *sys.argv[2:]]
        runpy.run_path("main.py", run_name="__main__")
