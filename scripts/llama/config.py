"""config.json: which of Llama's relatives a folder holds, and its sizes."""

from dataclasses import dataclass
from pathlib import Path

from models import DTYPES, ModelError

from llama import mxfp4
from llama.attention import MOST_LAYERS, Attention, read_attentions
from llama.folder import Values, read_json
from llama.frequencies import read_context

#: Values of model_type that are understood.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_oss")

MAX_HEAD_DIM = 256  # cufa's

#: Constants of gpt-oss's gate, which has no others: see `llama.ops.gated`.
SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}


@dataclass(frozen=True)
class Config:
    """The settings of a model's computation.

    Attributes
    ----------
    vocabulary, hidden, inner, layers, heads, kv_heads, head_dim : int
        `inner` is the width between the two halves of the perceptron.
    eps : float
        Epsilon of the norms.
    attentions : tuple of Attention
        How each layer attends.
    gate : {"silu", "gelu", "clamped"}
        Gate of the perceptron.
    experts, chosen : int
        How many perceptrons each layer has, and how many of them each token takes; 0 of those are
        one that all tokens take, and no router.
    packed : bool
        Whether the experts' matrices are MXFP4.
    sinks : bool
        Whether heads have sinks, as in `cufa.attention`.
    tied : bool
        Whether the embedding's matrix gives the logits, too.
    qkv_bias, output_bias, mlp_bias, qk_norm, post_norms : bool
        Which parts there are; `post_norms` are those of what attention and perceptron give.
    norm_offset : float
        Is added to the weights of norms.
    embedding_scale : float or None
        Factor of the embeddings.
    logit_softcap : float or None
        Logits are c * tanh(logit / c).
    context : int
        Positions that the model was made for, with those that a scaling adds.
    dtype : str
        Dtype of the checkpoint: a key of `DTYPES`.
    eos : tuple of int
        Tokens that end a text.
    """

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    attentions: tuple[Attention, ...]
    gate: str
    experts: int
    chosen: int
    packed: bool
    sinks: bool
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    post_norms: bool
    norm_offset: float
    embedding_scale: float | None
    logit_softcap: float | None
    context: int
    dtype: str
    eos: tuple[int, ...]


def read_config(folder: Path) -> Config:
    """Return what a folder's config.json says.

    Raises
    ------
    ModelError
        It is missing or damaged, or asks for what is not supported.
    """
    path = folder / "config.json"
    return config_of(Values(read_json(path), str(path)), str(folder))


def config_of(raw: Values, name: str) -> Config:
    """Return what the content of a config.json says, see `read_config`; errors name the model."""
    model_type = raw.text("model_type")
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ModelError(
            f"{name} holds a model of type {model_type!r}, which is not supported ({known} are)"
        )
    is_gpt_oss = model_type == "gpt_oss"
    quantization = raw.part("quantization_config")
    packed = quantization is not None
    if quantization is not None:
        method = quantization.get("quant_method") or "of no named method"
        if not (is_gpt_oss and method == "mxfp4"):
            raise ModelError(f"{name} holds quantized weights, which are not supported: {method}")
    is_gemma = model_type in ("gemma2", "gemma3_text")
    key, needed = ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    if (activation := raw.text(key, needed)) != needed:
        raise ModelError(f"the activation {activation!r} is not supported ({needed} is)")
    if raw.flag("use_bidirectional_attention", False):
        raise ModelError("attention to later tokens is not supported")
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    kv_heads = raw.integer("num_key_value_heads", heads)
    usual = 256 if is_gemma else 64 if is_gpt_oss else max(1, hidden // heads)
    head_dim = raw.integer("head_dim", usual)
    if heads % kv_heads:
        raise ModelError(f"{heads} query heads are no multiple of {kv_heads} key and value heads")
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise ModelError(f"heads of {head_dim} elements: even numbers to {MAX_HEAD_DIM} are needed")
    biased = model_type not in ("mistral", "qwen2") and raw.flag("attention_bias", is_gpt_oss)
    experts, chosen = _experts(raw) if is_gpt_oss else (0, 0)
    inner = raw.integer("intermediate_size")
    if packed and (hidden % mxfp4.BLOCK or inner % mxfp4.BLOCK):
        raise ModelError(f"MXFP4 needs sizes that are multiples of {mxfp4.BLOCK}")
    dtype = raw.text("dtype", raw.text("torch_dtype", "float32"))
    return Config(
        vocabulary=raw.integer("vocab_size"),
        hidden=hidden,
        inner=inner,
        layers=raw.integer("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=raw.number("rms_norm_eps"),
        attentions=read_attentions(raw, model_type, head_dim),
        gate="gelu" if is_gemma else "clamped" if is_gpt_oss else "silu",
        experts=experts,
        chosen=chosen,
        packed=packed,
        sinks=is_gpt_oss,
        tied=raw.flag("tie_word_embeddings", is_gemma),
        qkv_bias=biased or model_type == "qwen2",
        output_bias=biased,
        mlp_bias=model_type == "llama" and raw.flag("mlp_bias", False),
        qk_norm=model_type in ("qwen3", "gemma3_text"),
        post_norms=is_gemma,
        norm_offset=1.0 if is_gemma else 0.0,
        embedding_scale=hidden**0.5 if is_gemma else None,
        logit_softcap=_logit_softcap(raw, model_type),
        context=read_context(raw, model_type),
        dtype=dtype if dtype in DTYPES else "float32",
        eos=raw.tokens("eos_token_id"),
    )


def _logit_softcap(raw: Values, model_type: str) -> float | None:
    if model_type == "gemma2":
        return raw.number_or_null("final_logit_softcapping", 30.0)
    if model_type == "gemma3_text" and raw.get("final_logit_softcapping") is not None:
        return raw.number("final_logit_softcapping")
    return None


def _experts(raw: Values) -> tuple[int, int]:
    """Return how many experts there are, and how many a token takes."""
    for key, value in SWIGLU.items():
        if raw.number(key, value) != value:
            raise ModelError(f"{key} must be {value}, not {raw.get(key)}")
    experts, chosen = raw.integer("num_local_experts"), raw.integer("num_experts_per_tok")
    if chosen > experts:
        raise ModelError(f"num_experts_per_tok is {chosen}, but there are {experts} experts")
    return experts, chosen
