"""The zoo: architectures of transformers, timm and PyTorch, with random parameters, for measurements of memory.

They come from other projects, and nothing in narrowband depends on their names, so results may hold for your model,
too. Sizes are those of the smallest published model of a family or, if that is large, a few narrow blocks of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["ZOO", "Architecture"]

_PIXELS = 224
_TOKENS = 256
_VOCABULARY = 8000


class Architecture(NamedTuple):
    """A model of another package.

    Attributes:
        package: the package that has it, which must be installed.
        family: convolutions, attention over images, attention over text, or a recurrence.
        build: makes the model and its inputs for a batch size.
    """

    package: str
    family: str
    build: Callable[[int], tuple[nn.Module, tuple[Any, ...]]]

    @property
    def is_installed(self) -> bool:
        """Return whether its package is installed."""
        return find_spec(self.package) is not None


class _Logits(nn.Module):
    """Wrap a model of transformers to return only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def _images(batch: int) -> tuple[Tensor]:
    return (torch.randn(batch, 3, _PIXELS, _PIXELS),)


def _tokens(batch: int) -> tuple[Tensor]:
    return (torch.randint(_VOCABULARY, (batch, _TOKENS)),)


def _of_transformers(head: str, config: str, options: dict[str, Any], batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    transformers = import_module("transformers")
    made = getattr(transformers, f"{config}Config")(**options)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(made).train()
    return _Logits(model), _images(batch) if head == "ImageClassification" else _tokens(batch)


def _of_timm(name: str, batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return import_module("timm").create_model(name, num_classes=1000).train(), _images(batch)


class _Recurrent(nn.Module):
    """A recurrent model from tokens to logits.

    Args:
        cells: whether to loop over tokens in Python, so that thousands of small tensors are saved.
    """

    def __init__(self, cells: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(_VOCABULARY, 256), nn.Linear(256, _VOCABULARY)
        self.inner: nn.Module = nn.GRUCell(256, 256) if cells else nn.LSTM(256, 256, num_layers=2, batch_first=True)
        self._cells = cells

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x)
        if not self._cells:
            return self.head(self.inner(embedded)[0])  # type: ignore[no-any-return]
        state, states = embedded.new_zeros(len(x), 256), []
        for token in embedded.unbind(1):
            state = self.inner(token, state)
            states.append(state)
        return self.head(torch.stack(states, 1))  # type: ignore[no-any-return]


def _of_torch(cells: bool, batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return _Recurrent(cells), _tokens(batch)


def _recurrent(cells: bool) -> Architecture:
    return Architecture("torch", "recurrences", functools.partial(_of_torch, cells))


def _transformers(family: str, head: str, config: str, **options: Any) -> Architecture:
    return Architecture("transformers", family, functools.partial(_of_transformers, head, config, options))


def _image(family: str, config: str, **options: Any) -> Architecture:
    return _transformers(family, "ImageClassification", config, num_labels=1000, **options)


def _text(config: str, *, head: str = "CausalLM", family: str = "text", **options: Any) -> Architecture:
    return _transformers(family, head, config, vocab_size=_VOCABULARY, **options)


def _timm(family: str, name: str) -> Architecture:
    return Architecture("timm", family, functools.partial(_of_timm, name))


_TINY = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3}
_BLOCKS: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_GATED = _BLOCKS | {"intermediate_size": 688}
_FEW_KEYS = _GATED | {"num_key_value_heads": 2}
_ATTO: dict[str, Any] = {"hidden_sizes": [40, 80, 160, 320], "depths": [2, 2, 6, 2]}
_NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}

#: Name → architecture.
ZOO: dict[str, Architecture] = {
    "resnet-26": _image("convolutions", "ResNet", depths=[2, 2, 2, 2]),
    "bit-50": _image("convolutions", "Bit"),
    "regnet-y-400mf": _image(
        "convolutions", "RegNet", embedding_size=32, hidden_sizes=[48, 104, 208, 440], depths=[1, 3, 6, 6],
        groups_width=8, layer_type="y",
    ),
    "efficientnet-b0": _image(
        "convolutions", "EfficientNet", width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, image_size=224,
        initializer_range=0.2,  # with the default 0.02, no gradient reaches the first layers
    ),
    "mobilenet-v1": _image("convolutions", "MobileNetV1"),
    "mobilenet-v2": _image("convolutions", "MobileNetV2"),
    "convnext-atto": _image("convolutions", "ConvNext", **_ATTO),
    "convnext-v2-atto": _image("convolutions", "ConvNextV2", **_ATTO),
    "poolformer-s12": _image("convolutions", "PoolFormer"),
    "vit-tiny": _image("images", "ViT", intermediate_size=768, **_TINY),
    "beit-tiny": _image("images", "Beit", intermediate_size=768, **_TINY),
    "dinov2-tiny": _image("images", "Dinov2", image_size=224, **_TINY),
    "swin-tiny": _image("images", "Swin"),
    "swin-v2-tiny": _image("images", "Swinv2", image_size=224),
    "focalnet-tiny": _image("images", "FocalNet"),
    "segformer-b0": _image("images", "Segformer"),
    "pvt-tiny": _image("images", "Pvt"),
    "mobilevit-xs": _image("images", "MobileViT"),
    "cvt-13": _image("images", "Cvt"),
    "bert": _text("Bert", head="MaskedLM", intermediate_size=1024, **_BLOCKS),
    "distilbert": _text("DistilBert", head="MaskedLM", dim=256, n_layers=4, n_heads=4, hidden_dim=1024),
    "electra": _text("Electra", head="MaskedLM", intermediate_size=1024, **_BLOCKS),
    "albert": _text("Albert", head="MaskedLM", intermediate_size=1024, **_BLOCKS),
    "deberta-v2": _text("DebertaV2", head="MaskedLM", intermediate_size=1024, **_BLOCKS),
    "gpt2": _text("GPT2", n_embd=256, n_layer=4, n_head=4, **_NO_ENDS),
    "gpt-neox": _text("GPTNeoX", intermediate_size=1024, **_BLOCKS),
    "opt": _text("OPT", ffn_dim=1024, word_embed_proj_dim=256, **_BLOCKS),
    "bloom": _text("Bloom", hidden_size=256, n_layer=4, n_head=4),
    "llama": _text("Llama", **_GATED),
    "mistral": _text("Mistral", **_FEW_KEYS),
    "qwen3": _text("Qwen3", head_dim=64, **_FEW_KEYS),
    "gemma2": _text("Gemma2", head_dim=64, **_FEW_KEYS),
    "mixtral": _text("Mixtral", num_local_experts=4, **_FEW_KEYS),
    "mamba": _text("Mamba", family="recurrences", hidden_size=192, num_hidden_layers=4),
    "rwkv": _text("Rwkv", family="recurrences", hidden_size=192, num_hidden_layers=4),
    "lstm": _recurrent(cells=False),
    "gru-cells": _recurrent(cells=True),
    "timm-resnet26d": _timm("convolutions", "resnet26d"),
    "timm-regnety-004": _timm("convolutions", "regnety_004"),
    "timm-efficientnet-b0": _timm("convolutions", "efficientnet_b0"),
    "timm-mobilenetv3": _timm("convolutions", "mobilenetv3_large_100"),
    "timm-convnext-atto": _timm("convolutions", "convnext_atto"),
    "timm-densenet121": _timm("convolutions", "densenet121"),
    "timm-deit-tiny": _timm("images", "deit_tiny_patch16_224"),
    "timm-swin-tiny": _timm("images", "swin_tiny_patch4_window7_224"),
    "timm-mixer-s32": _timm("images", "mixer_s32_224"),
}  # fmt: skip
