"""The tensors of a checkpoint: their names and shapes, by what config.json says."""

from collections.abc import Callable, Mapping

from models import Array, ModelError

from llama import mxfp4
from llama.config import Config

EMBEDDING, LAST_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

#: Norms of what enters attention and perceptron; those of Gemma have others of what they give.
LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
PRE_NORMS = ("input_layernorm", "pre_feedforward_layernorm")
POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")

#: Tensors of experts: all of a layer in one tensor each, or in two of MXFP4.
GATE_UP, DOWN = "gate_up_proj", "down_proj"
BLOCKS, SCALES = "_blocks", "_scales"


def tensor_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that a checkpoint of this model holds."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (c.vocabulary, c.hidden),
        LAST_NORM: (c.hidden,),
    }
    if not c.tied:
        shapes[HEAD] = (c.vocabulary, c.hidden)
    for i in range(c.layers):
        at = f"model.layers.{i}"
        for name in (*PRE_NORMS, *POST_NORMS) if c.post_norms else LLAMA_NORMS:
            shapes[f"{at}.{name}.weight"] = (c.hidden,)
        if c.qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{at}.self_attn.{name}.weight"] = (c.head_dim,)
        if c.sinks:
            shapes[f"{at}.self_attn.sinks"] = (c.heads,)
        dense = [
            ("self_attn.q_proj", q, c.hidden, c.qkv_bias),
            ("self_attn.k_proj", kv, c.hidden, c.qkv_bias),
            ("self_attn.v_proj", kv, c.hidden, c.qkv_bias),
            ("self_attn.o_proj", c.hidden, q, c.output_bias),
        ]
        if c.experts:
            dense += [("mlp.router", c.experts, c.hidden, True)]
            shapes |= _expert_shapes(f"{at}.mlp.experts", c)
        else:
            dense += [
                ("mlp.gate_proj", c.inner, c.hidden, c.mlp_bias),
                ("mlp.up_proj", c.inner, c.hidden, c.mlp_bias),
                ("mlp.down_proj", c.hidden, c.inner, c.mlp_bias),
            ]
        for name, outputs, inputs, bias in dense:
            shapes[f"{at}.{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{at}.{name}.bias"] = (outputs,)
    return shapes


def check_shapes(
    where: str,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    source: str,
) -> None:
    """Check that there are tensors of just the expected names and shapes.

    Parameters
    ----------
    where : str
        The folder or file that holds them.
    found, expected : mapping of str to tuple of int
        Shapes by name.
    source : str
        Where the expected shapes come from.

    Raises
    ------
    ModelError
        A tensor is missing, not expected, or of another shape.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{where} lacks {_listed(missing)}")
    extra = [name for name in found if name not in expected]
    if extra:
        raise ModelError(f"{where} holds {_listed(extra)}, which {source} leaves no room for")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"{where}: {name} has the shape {found[name]}, {source} says {shape}")


def _listed(names: list[str]) -> str:
    first = f"the tensor {names[0]}"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def _expert_shapes(at: str, config: Config) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    count, hidden, inner = config.experts, config.hidden, config.inner
    for name, outputs, inputs in ((GATE_UP, 2 * inner, hidden), (DOWN, hidden, inner)):
        if config.packed:
            blocks = inputs // mxfp4.BLOCK
            shapes[f"{at}.{name}{BLOCKS}"] = (count, outputs, blocks, mxfp4.BLOCK // 2)
            shapes[f"{at}.{name}{SCALES}"] = (count, outputs, blocks)
        else:
            shapes[f"{at}.{name}"] = (count, inputs, outputs)
        shapes[f"{at}.{name}_bias"] = (count, outputs)
    return shapes


def read_experts(read: Callable[[str], Array], at: str, packed: bool) -> Array:
    """Return the matrices of a layer's experts, (experts, outputs, inputs), by a tensor's name."""
    if packed:
        return mxfp4.unpacked(read(f"{at}{BLOCKS}"), read(f"{at}{SCALES}"))
    return read(at).swapaxes(1, 2)
