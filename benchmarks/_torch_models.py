"""The models of `models/` in torch, for comparison: torchvision's convolutional nets, the others written in torch.

Decides their layers, which are those of `models/`. Does not decide the precision; see `_torch_steps.py`. Imported only
where torch is installed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Self-attention over `[batch, length, width]`."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        return self.output(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A Transformer layer, normalised before attention and feed-forward as in GPT-2, or after each as in BERT."""

    def __init__(self, width: int, heads: int, causal: bool, norm_first: bool, eps: float, gelu: str) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention = Attention(width, heads, causal)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate=gelu), nn.Linear(4 * width, width)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=eps) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.norm_first:
            x = x + self.attention(self.norms[0](x), mask)
            return x + self.feed_forward(self.norms[1](x))
        x = self.norms[0](x + self.attention(x, mask))
        return self.norms[1](x + self.feed_forward(x))


class GPT2(nn.Module):
    """`[batch, length]` tokens to `[batch, length, vocabulary]` logits; the output layer is the embedding's."""

    def __init__(
        self, vocabulary: int = 50304, layers: int = 12, width: int = 768, heads: int = 12, length: int = 1024
    ):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, True, True, 1e-5, "tanh") for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


class BERT(nn.Module):
    """`[batch, length]` tokens to `[batch, length, vocabulary]` logits; 0 is padding."""

    def __init__(self, vocabulary: int = 30528, layers: int = 12, width: int = 768, heads: int = 12, length: int = 512):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.ModuleList(Block(width, heads, False, False, 1e-12, "none") for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.norm(self.embedding(tokens) + positions + self.segments(torch.zeros_like(tokens)))
        mask = (tokens > 0)[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.head(x), self.embedding.weight, self.bias)


class LSTM(nn.Module):
    """`[batch, length]` tokens to `[batch, length, vocabulary]` logits."""

    def __init__(self, vocabulary: int = 10000, layers: int = 2, width: int = 1536) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, layers, batch_first=True)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.layers(self.embedding(tokens))[0])


def _vision(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)


def _tiny_vision(name: str, classes: int) -> nn.Module:
    from torchvision.models import densenet, resnet, vgg

    if name == "resnet50":
        return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=classes)
    if name == "densenet121":
        return densenet.DenseNet(8, (2, 2), 16, num_classes=classes)
    model = vgg.VGG(vgg.make_layers([8, "M", 16, "M"]), num_classes=classes, init_weights=False)
    model.avgpool, model.classifier = nn.AdaptiveAvgPool2d(2), nn.Sequential(nn.Linear(64, classes))
    return model


VISION = ("resnet50", "vgg19", "densenet121")
TEXT: dict[str, Callable[..., nn.Module]] = {"bert_base": BERT, "lstm": LSTM, "gpt2": GPT2}


def make_torch(name: str, tiny: dict[str, Any] | None = None) -> nn.Module:
    """The model of that name in float32, in training mode; `tiny` holds the sizes of a tiny one."""
    if name in VISION:
        return _tiny_vision(name, tiny["classes"]) if tiny else _vision(name)
    keep: Sequence[str] = ("vocabulary", "layers", "width", "heads", "length")
    sizes = {key: value for key, value in (tiny or {}).items() if key in keep and (name != "lstm" or key != "length")}
    return TEXT[name](**sizes)
