"""The auxiliary states against the models that they were written for: out of a real cache, through ours, and back.

`qwen4_exp` has the QSA indexer and the PLE layers, `glm5_next` the pooled DSA indexer. Blobs that went through our
states continue bit for bit; our n-gram ids are the model's; our pooled keys are the model's in its rounding.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the environment of requirements-transformers.txt")
pytest.importorskip("transformers", reason="needs the environment of requirements-transformers.txt")

from round_trip import tokens  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

from tiered_cache.devices.numpy import NumpyDevice  # noqa: E402
from tiered_cache.engines.transformers.probe import Stepper  # noqa: E402
from tiered_cache.errors import BlobError  # noqa: E402
from tiered_cache.states import bfloat16  # noqa: E402
from tiered_cache.states.dsa import GATE, KEYS, VALID, DsaIndexer, DsaLayout  # noqa: E402
from tiered_cache.states.ple import CONV, PleLayout, PleState  # noqa: E402
from tiered_cache.states.qsa import KEYS as QSA_KEYS  # noqa: E402
from tiered_cache.states.qsa import QsaIndexer, QsaLayout  # noqa: E402

DEVICE = NumpyDevice()
COUNT = 45
CAPACITY = 64
WAYS = ((9,), (1,) * 9, (4, 1, 1, 3))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@lru_cache(maxsize=4)
def stepper_of(family: str, dtype: str) -> Stepper:
    return Stepper(tiny_model(family, getattr(torch, dtype)), None)


@lru_cache(maxsize=4)
def filled(family: str, dtype: str) -> Any:
    """A cache of `COUNT` tokens, computed in pieces; not to be changed."""
    stepper = stepper_of(family, dtype)
    cache = None
    text = tokens(COUNT, 1)
    for start, stop in ((0, 20), (20, 32), (32, COUNT)):
        cache, _ = stepper.step(cache, start, text[start:stop])
    return cache


def goes_on_alike(family: str, dtype: str, restored: Any) -> bool:
    """Whether the model goes on from both caches with the same logits, cut in every way."""
    stepper = stepper_of(family, dtype)
    ahead = tokens(9, 2)
    for way in WAYS:
        pair = [copy.deepcopy(filled(family, dtype)), copy.deepcopy(restored)]
        done = 0
        for count in way:
            logits = []
            for index, cache in enumerate(pair):
                pair[index], row = stepper.step(cache, COUNT + done, ahead[done : done + count])
                logits.append(row)
            done += count
            if not torch.equal(*logits):
                return False
    return True


def bits(tensor: Any) -> np.ndarray[Any, Any]:
    """bfloat16 as we hold it."""
    return tensor.contiguous().view(torch.uint16).numpy()


def as_bfloat16(array: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(array)).view(torch.bfloat16)


# -- QSA


def qsa_layout(rounding: Any) -> QsaLayout:
    config = stepper_of("qwen4_exp", "bfloat16").model.config
    rope = config.rope_parameters
    return QsaLayout(
        layers=(1, 3),
        head_dim=config.indexer_head_dim,
        ratio=config.indexer_compress_ratio,
        rotary_dim=int(config.head_dim * rope.get("partial_rotary_factor", 1.0)),
        theta=rope["rope_theta"],
        epsilon=config.rms_norm_eps,
        rounding=rounding,
    )


def qsa_weight(dtype: str = "bfloat16") -> np.ndarray[Any, Any]:
    layers = stepper_of("qwen4_exp", dtype).model.model.layers
    return np.stack([layers[n].self_attn.indexer.k_layernorm.weight.detach().float().numpy() for n in (1, 3)])


def indexer_of(cache: Any, rounding: Any = "each") -> QsaIndexer:
    indexer = QsaIndexer(qsa_layout(rounding), DEVICE, CAPACITY, qsa_weight())
    keys = np.stack([bits(cache.layers[n].indexer_keys[0]) for n in (1, 3)])
    for start, stop in ((0, 7), (7, 8), (8, keys.shape[1])):
        indexer.append(start, {QSA_KEYS: keys[:, start:stop]})
        indexer.pool()
    return indexer


def test_qsa_blobs_bring_the_model_back() -> None:
    cache = filled("qwen4_exp", "bfloat16")
    blobs = {layer: indexer_of(cache).encode_layer(layer) for layer in (1, 3)}
    restored = QsaIndexer(qsa_layout("each"), DEVICE, CAPACITY, qsa_weight())
    restored.restore(blobs)
    assert restored.tokens == COUNT
    fresh = copy.deepcopy(cache)
    for index, layer in enumerate((1, 3)):
        rows = restored.read(QSA_KEYS, 0, COUNT)[index]
        fresh.layers[layer].indexer_keys = as_bfloat16(rows)[None]
    assert goes_on_alike("qwen4_exp", "bfloat16", fresh)
    other = copy.deepcopy(fresh)
    other.layers[1].indexer_keys = other.layers[1].indexer_keys.flip(1)
    assert not goes_on_alike("qwen4_exp", "bfloat16", other)


def models_block_keys(keys: Any, layer: int, dtype: str, text: int) -> Any:
    """What the model's own functions pool from raw keys [T, head_dim] at positions from 0."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb

    model = stepper_of("qwen4_exp", dtype).model.model
    indexer = model.layers[layer].self_attn.indexer
    blocks = len(keys) // indexer.compress_ratio
    with torch.no_grad():
        cos, sin = model.rotary_emb(keys[None], torch.arange(text)[None, None].expand(3, 1, -1))
        starts = torch.arange(blocks) * indexer.compress_ratio
        groups = keys[: blocks * indexer.compress_ratio].view(blocks, indexer.compress_ratio, -1)
        pooled = indexer.k_layernorm(groups.float().mean(dim=1).to(keys.dtype))
        turned = apply_rotary_pos_emb(
            pooled.unsqueeze(1), cos=cos[0].index_select(0, starts), sin=sin[0].index_select(0, starts)
        )
    return turned.squeeze(1)


def ulps(mine: Any, theirs: Any) -> np.ndarray[Any, Any]:
    """Distances of bfloat16 bit patterns in units of the last place."""
    ordered = [np.where(b < 0x8000, b.astype(np.int64), 0x8000 - b.astype(np.int64)) for b in (mine, theirs)]
    return np.abs(ordered[0] - ordered[1])


@pytest.mark.parametrize("source", ["cache", "random"])
def test_pooled_keys_are_the_model_s_where_it_rounds(source: str) -> None:
    """Rounding `each`: equal but for single last places, since sums of squares are taken in another order."""
    count = COUNT if source == "cache" else 4096
    if source == "cache":
        keys = torch.stack([filled("qwen4_exp", "bfloat16").layers[n].indexer_keys[0] for n in (1, 3)])
    else:
        keys = torch.randn(2, count, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    indexer = QsaIndexer(qsa_layout("each"), DEVICE, count, qsa_weight())
    indexer.append(0, {QSA_KEYS: np.stack([bits(k) for k in keys])})
    indexer.pool()
    mine = indexer.block_keys(0, count // 4)
    for index, layer in enumerate((1, 3)):
        theirs = bits(models_block_keys(keys[index], layer, "bfloat16", count))
        distance = ulps(mine[index], theirs)
        near_zero = np.abs(bfloat16.to_float32(mine[index]) - bfloat16.to_float32(theirs)) < 2e-2
        assert (distance == 0).mean() > 0.9999
        assert near_zero.all()


def test_pooled_keys_are_the_model_s_in_float32_rounded_once() -> None:
    """Rounding `once`: what the model computes in float32, and one rounding at the end."""
    count = 4096
    keys = torch.randn(2, count, 16, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    layout = qsa_layout("once")
    weight = qsa_weight("float32")
    indexer = QsaIndexer(layout, DEVICE, count, weight)
    indexer.append(0, {QSA_KEYS: np.stack([bits(k) for k in keys])})
    indexer.pool()
    mine = indexer.block_keys(0, count // 4)
    for index, layer in enumerate((1, 3)):
        exact = models_block_keys(keys[index].float(), layer, "float32", count)
        distance = ulps(mine[index], bits(exact.to(torch.bfloat16)))
        assert (distance == 0).mean() > 0.9999
        assert np.abs(bfloat16.to_float32(mine[index]) - exact.numpy()).max() < 2e-2


# -- PLE


def ple_layout(**more: Any) -> PleLayout:
    config = stepper_of("qwen4_exp", "bfloat16").model.config
    return PleLayout(
        layers=(0, 2),
        vocab=config.vocab_size,
        eos=config.eos_token_id,
        channels=config.hc_count * config.hidden_size,
        kernel=config.ple_conv_kernel_size,
        ngram_size=config.ngram_size,
        heads_per_ngram=config.heads_per_ngram,
        size_base=config.ngram_vocab_size_base,
        seed=config.seed,
        **more,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ple_blobs_bring_the_model_back(dtype: str) -> None:
    cache = filled("qwen4_exp", dtype)
    layout = ple_layout()
    state = PleState(layout, DEVICE)
    state.advance(tokens(COUNT, 1))
    conv = np.stack([cache.layers[n].conv_states[1][0].float().numpy().T for n in (0, 2)])
    state.write_conv(np.ascontiguousarray(conv))
    for layer in (0, 2):
        assert state.history.tolist() == cache.layers[layer].conv_states[2][0].tolist()
    blobs = {layer: state.encode_layer(layer) for layer in (0, 2)}
    assert all(len(blob) == 4 + 4 * 2 + 4 * layout.state_len * layout.channels for blob in blobs.values())
    restored = PleState(layout, DEVICE)
    restored.restore(COUNT, blobs)
    fresh = copy.deepcopy(cache)
    for index, layer in enumerate((0, 2)):
        held = fresh.layers[layer].conv_states
        held[1] = torch.from_numpy(restored.arrays[CONV][index].T.copy()).to(held[1].dtype)[None]
        held[2] = torch.from_numpy(restored.history.astype(np.int64))[None]
    assert goes_on_alike("qwen4_exp", dtype, fresh)
    fresh.layers[2].conv_states[2] = fresh.layers[2].conv_states[2].flip(-1)
    assert not goes_on_alike("qwen4_exp", dtype, fresh)


class _Recorder(torch.nn.Module):
    """In place of an n-gram table: remembers what is looked up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.zeros(1, width)
        self.ids: Any = None

    def forward(self, ids: Any) -> Any:
        self.ids = ids
        return torch.zeros(*ids.shape, self.weight.shape[1])


@pytest.mark.parametrize("size_base", [50, 20_000_000])
def test_ngram_ids_are_the_model_s(size_base: int) -> None:
    """Thousands of calls of random length, over texts full of ends, on two layers, small and real table sizes."""
    from transformers import DynamicCache
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextNGramEmbedding

    config = copy.deepcopy(stepper_of("qwen4_exp", "bfloat16").model.config)
    config.ngram_vocab_size_base = size_base
    layout = PleLayout(
        layers=(0, 2),
        vocab=config.vocab_size,
        eos=config.eos_token_id,
        channels=4,
        ngram_size=config.ngram_size,
        heads_per_ngram=config.heads_per_ngram,
        size_base=size_base,
        seed=config.seed,
    )
    with torch.device("meta"):
        made = [Qwen4ExpTextNGramEmbedding(config, 32, layer, index) for index, layer in enumerate((0, 2))]
    theirs = []
    for module, ngram_hash in zip(made, layout.hashes(), strict=True):
        assert module.head_vocab_sizes == list(ngram_hash.sizes)
        assert module.head_offsets == list(ngram_hash.offsets)
        module.ngram_embedding = _Recorder(8)
        for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
            setattr(module, name, torch.nn.Buffer(_buffer(module, name, config)))
        assert module.layer_multipliers.tolist() == list(ngram_hash.multipliers)
        theirs.append(module)
    rng = np.random.default_rng(0)
    calls = 0
    while calls < 3000:
        cache = DynamicCache(config=config)
        state = PleState(layout, DEVICE)
        for _ in range(int(rng.integers(1, 60))):
            count = int(rng.choice([1, 1, 1, 2, 3, 7, 33]))
            ids = rng.integers(0, config.vocab_size, count).astype(np.uint32)
            ids[rng.random(count) < 0.15] = layout.eos
            mine = state.ngram_ids(ids)
            state.advance(ids)
            state.write_conv(state.arrays[CONV])
            for index, module in enumerate(theirs):
                module(torch.from_numpy(ids.astype(np.int64))[None], cache)
                assert np.array_equal(module.ngram_embedding.ids[0].numpy(), mine[index].astype(np.int64))
            calls += 1


def _buffer(module: Any, name: str, config: Any) -> Any:
    """A buffer's content, as the model computes it."""
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

    if name == "layer_multipliers":
        return modeling._build_layer_multipliers(
            config.vocab_size, config.ngram_size, module.ple_layer_index, config.seed
        )
    return torch.tensor(module.head_vocab_sizes if name == "ngram_heads_vocab_sizes" else module.head_offsets)


# -- DSA


def test_dsa_blobs_bring_the_model_back() -> None:
    cache = filled("glm5_next", "bfloat16")
    dim = 16
    layout = DsaLayout(layers=(1, 3), head_dim=dim)
    packed = [cache.layers[n].indexer_keys[0] for n in (1, 3)]
    assert packed[0].shape == (COUNT, 2 * dim + 1)
    indexer = DsaIndexer(layout, DEVICE, CAPACITY)
    rows = {
        KEYS: np.stack([bits(p[:, :dim]) for p in packed]),
        GATE: np.stack([bits(p[:, dim : 2 * dim]) for p in packed]),
        VALID: np.stack([p[:, -1].to(torch.uint8).numpy() for p in packed]),
    }
    for start, stop in ((0, 20), (20, COUNT)):
        indexer.append(start, {name: array[:, start:stop] for name, array in rows.items()})
    blobs = {layer: indexer.encode_layer(layer) for layer in (1, 3)}
    assert all(len(blob) == 16 + COUNT * (4 * dim + 1) for blob in blobs.values())
    restored = DsaIndexer(layout, DEVICE, CAPACITY)
    restored.restore(blobs)
    fresh = copy.deepcopy(cache)
    for index, layer in enumerate((1, 3)):
        parts = [as_bfloat16(restored.read(name, 0, COUNT)[index]) for name in (KEYS, GATE)]
        valid = torch.from_numpy(restored.read(VALID, 0, COUNT)[index].copy()).to(torch.bfloat16)[:, None]
        fresh.layers[layer].indexer_keys = torch.cat([*parts, valid], dim=-1)[None]
        assert torch.equal(fresh.layers[layer].indexer_keys, cache.layers[layer].indexer_keys)
    assert goes_on_alike("glm5_next", "bfloat16", fresh)
    fresh.layers[3].indexer_keys = fresh.layers[3].indexer_keys.flip(1)
    assert not goes_on_alike("glm5_next", "bfloat16", fresh)
    spoilt = blobs[1].copy()
    spoilt[-1] = 2
    with pytest.raises(BlobError):
        restored.restore({1: spoilt, 3: blobs[3]})
