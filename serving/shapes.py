"""Shapes of small models: what goes into ``config.json``, and which weights there are.

Query and key projections are strong enough that attention picks tokens, and its output outweighs
what the last token alone says. Pure.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["BENCHMARK", "LLAMA", "MLA", "Gains", "LlamaShape", "MlaShape", "Shape"]


@dataclass(frozen=True)
class Gains:
    """How much each part of a layer amplifies an input of unit variance.

    Attributes:
        attention: Standard deviation of the attention scores; above 2 a head sees few tokens.
        output: Gain of the output projection of attention.
        feed_forward: Gain of each projection of the feed-forward part.
        embedding: Standard deviation of an embedding.
    """

    attention: float = 3.0
    output: float = 4.0
    feed_forward: float = 1.0
    embedding: float = 0.7


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """A Llama with grouped-query attention.

    Attributes:
        hidden: Width of the residual stream.
        layers: Decoder layers.
        heads: Query heads; a multiple of the TP size.
        kv_heads: KV heads; a multiple of the TP size.
        head_dim: Width of a head; one that attention on CPU knows (32, 64, 128, ...).
        intermediate: Width of the feed-forward part.
        vocabulary: Number of tokens.
        positions: Longest sequence, in tokens.
        seed: Of the weights.
        gains: Of the weights.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256
    vocabulary: int = 1024
    positions: int = 2048
    seed: int = 1
    gains: Gains = field(default_factory=Gains)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes in all layers, in float32."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4

    def config(self) -> dict[str, object]:
        """The content of ``config.json``."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": 10_000.0,
            **_common(self),
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Name, shape and gain of each tensor; a gain of 0 marks a norm."""
        width, queries, keys = (
            self.hidden,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        # Scores are products of two projections: each gets the square root of their gain.
        score = math.sqrt(self.gains.attention)
        for layer in range(self.layers):
            attention = f"model.layers.{layer}.self_attn"
            yield f"{attention}.q_proj.weight", (queries, width), score
            yield f"{attention}.k_proj.weight", (keys, width), score
            yield f"{attention}.v_proj.weight", (keys, width), 1.0
            yield f"{attention}.o_proj.weight", (width, queries), self.gains.output
            yield from _rest_of_layer(self, layer)
        yield from _ends(self)


@dataclass(frozen=True, kw_only=True)
class MlaShape:
    """A DeepSeek-V2 with latent attention (MLA) and without experts.

    The latent and rope widths are the only ones that vLLM's CPU kernel knows.

    Attributes:
        hidden: Width of the residual stream.
        layers: Decoder layers.
        heads: Attention heads; a multiple of the TP size.
        latent: Width of the compressed KV (``kv_lora_rank``).
        rope: Width of the part of a key that carries its position.
        nope: Width of the part of a key that does not.
        value: Width of a value.
        intermediate: Width of the feed-forward part.
        vocabulary: Number of tokens.
        positions: Longest sequence, in tokens.
        seed: Of the weights.
        gains: Of the weights.
    """

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    latent: int = 512
    rope: int = 64
    nope: int = 64
    value: int = 64
    intermediate: int = 256
    vocabulary: int = 1024
    positions: int = 2048
    seed: int = 2
    gains: Gains = field(default_factory=Gains)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes in all layers, in float32."""
        return self.layers * (self.latent + self.rope) * 4

    def config(self) -> dict[str, object]:
        """The content of ``config.json``."""
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.latent,
            "qk_rope_head_dim": self.rope,
            "qk_nope_head_dim": self.nope,
            "v_head_dim": self.value,
            # Every layer is dense; the experts are only named because the config wants them.
            "first_k_dense_replace": self.layers,
            "moe_layer_freq": 1,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "rope_theta": 10_000.0,
            # Scaling by 1 changes nothing but the code path. Without it vLLM 0.32 takes its CPU
            # kernel for rotation, which is wrong for MLA's strided queries and keys: prefill and
            # decode disagree with each other and between TP sizes.
            "rope_scaling": {
                "type": "yarn",
                "rope_type": "yarn",
                "factor": 1.0,
                "original_max_position_embeddings": self.positions,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            **_common(self),
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Name, shape and gain of each tensor; a gain of 0 marks a norm."""
        width, heads = self.hidden, self.heads
        score = math.sqrt(self.gains.attention)
        for layer in range(self.layers):
            attention = f"model.layers.{layer}.self_attn"
            yield f"{attention}.q_proj.weight", (heads * (self.nope + self.rope), width), score
            yield f"{attention}.kv_a_proj_with_mqa.weight", (self.latent + self.rope, width), score
            yield f"{attention}.kv_a_layernorm.weight", (self.latent,), 0.0
            yield (
                f"{attention}.kv_b_proj.weight",
                (heads * (self.nope + self.value), self.latent),
                score,
            )
            yield f"{attention}.o_proj.weight", (width, heads * self.value), self.gains.output
            yield from _rest_of_layer(self, layer)
        yield from _ends(self)


Shape = LlamaShape | MlaShape

LLAMA = LlamaShape()
MLA = MlaShape()
# 64 KiB of KV for a token, 59 MB for 900, at a prompt cost that two cores can pay.
BENCHMARK = LlamaShape(
    hidden=256, layers=16, heads=8, kv_heads=8, head_dim=64, intermediate=512, seed=3
)


def _common(shape: Shape) -> dict[str, object]:
    return {
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.positions,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        # No token may end a sequence by chance.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rest_of_layer(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], float]]:
    prefix, gain = f"model.layers.{layer}", shape.gains.feed_forward
    yield f"{prefix}.input_layernorm.weight", (shape.hidden,), 0.0
    yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,), 0.0
    yield f"{prefix}.mlp.gate_proj.weight", (shape.intermediate, shape.hidden), gain
    yield f"{prefix}.mlp.up_proj.weight", (shape.intermediate, shape.hidden), gain
    yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.intermediate), gain


def _ends(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], float]]:
    # A gain is relative to the width of the input, which an embedding does not have.
    embedding = shape.gains.embedding * math.sqrt(shape.hidden)
    yield "model.embed_tokens.weight", (shape.vocabulary, shape.hidden), embedding
    yield "model.norm.weight", (shape.hidden,), 0.0
    yield "lm_head.weight", (shape.vocabulary, shape.hidden), 2.0
