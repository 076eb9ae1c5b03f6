"""The transformers engine keeps every promise of an engine, and refuses by name what it cannot carry."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the environment of requirements-transformers.txt")
transformers = pytest.importorskip("transformers", reason="needs the environment of requirements-transformers.txt")

from tiny_models import VOCABULARY, tiny_model  # noqa: E402

from tiered_cache.engines.transformers import TransformersEngine, load_engine  # noqa: E402
from tiered_cache.engines.transformers.layout import CacheLayout  # noqa: E402
from tiered_cache.errors import (  # noqa: E402
    CapacityError,
    ConfigError,
    GeometryError,
    IdentityError,
    LockstepError,
    StateError,
)
from tiered_cache.geometry import PartKind  # noqa: E402
from tiered_cache.testing.engine_suite import EngineTests, export, frames_needed, restore  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from tiered_cache.engines.base import ComputingEngine

PROMPT = np.arange(3, 40, dtype=np.uint32)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@lru_cache(maxsize=8)
def model_of(family: str, dtype: str = "float32") -> Any:
    return tiny_model(family, getattr(torch, dtype))


def engine_of(family: str, dtype: str = "float32", **options: Any) -> TransformersEngine:
    return TransformersEngine(model_of(family, dtype), **{"block_tokens": 16, "capacity_bytes": 8 << 20, **options})


class _Conformance(EngineTests):
    vocabulary = VOCABULARY
    chunking_is_exact = False
    family: ClassVar[str]
    dtype: ClassVar[str] = "float32"
    options: ClassVar[dict[str, Any]] = {}

    def make_engine(self) -> TransformersEngine:
        return engine_of(self.family, self.dtype, **self.options)

    def mark(self, engine: ComputingEngine, sequence: int) -> tuple[int, str, int, int]:
        """Without the next token, which a state alone does not say: see `test_the_next_token_travels...`."""
        return engine.tokens(sequence), engine.digest(sequence), engine.output(sequence), 0


class TestRows(_Conformance):
    family = "llama"


class TestWindowsAndPooledRows(_Conformance):
    family, dtype = "deepseek_v4", "bfloat16"


@pytest.mark.slow
class TestWindows(_Conformance):
    family, dtype = "gemma3", "bfloat16"


@pytest.mark.slow
class TestBothOnOneLayer(_Conformance):
    family = "falcon_h1"


@pytest.mark.slow
class TestIndexerAndNgrams(_Conformance):
    family, dtype = "qwen4_exp", "bfloat16"


@pytest.mark.slow
class TestStaticCaches(_Conformance):
    family = "gemma3"
    options: ClassVar[dict[str, Any]] = {"static_tokens": 128}


# -- what a sequence can do beyond the suite


def running(engine: TransformersEngine, prompt: Any = PROMPT, room: int = 64) -> int:
    handle = engine.start(engine.reserve(room))
    engine.extend(handle, prompt)
    return handle


def moved(engine: TransformersEngine, handle: int, room: int = 64) -> int:
    """The same state in a fresh sequence."""
    tokens = engine.tokens(handle)
    return restore(engine, export(engine, handle, frames_needed(engine.geometry, tokens)), tokens, room)


def test_the_next_token_travels_as_the_sampler_s_state() -> None:
    engine = engine_of("llama")
    here = running(engine)
    there = moved(engine, here)
    with pytest.raises(StateError, match="no logits"):
        engine.next_token(there)
    assert engine.sampler_state(there) == b""
    engine.load_sampler_state(there, engine.sampler_state(here))
    assert engine.next_token(there) == engine.next_token(here)
    assert torch.equal(engine.logits(there), engine.logits(here))
    with pytest.raises(StateError, match="logits"):
        engine.load_sampler_state(there, b"12345")


def test_generate_goes_on_from_a_restored_cache() -> None:
    """A cache is handed over, used by transformers' own loop, and adopted again."""
    engine = engine_of("qwen3_next")
    here = running(engine, PROMPT[:-1])
    there = moved(engine, here)
    ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
    generated = []
    for handle in (here, there):
        cache = engine.hand_over(handle)
        out = engine.model.generate(ids, past_key_values=cache, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        generated.append(out[0].tolist())
        adopted = engine.adopt(cache, len(PROMPT) + 5, 64)
        assert engine.tokens(adopted) == len(PROMPT) + 5
        again = moved(engine, adopted)
        assert engine.digest(again) == engine.digest(adopted)
    assert generated[0] == generated[1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v32", "falcon_h1", "qwen4_exp", "minimax_m3_vl"])
def test_static_caches_are_carried(family: str) -> None:
    engine = engine_of(family, static_tokens=64)
    here = running(engine)
    there = moved(engine, here)
    for count in (1, 1, 7, 1):
        ahead = np.full(count, 5, dtype=np.uint32)
        for handle in (here, there):
            engine.extend(handle, ahead)
        assert torch.equal(engine.logits(here), engine.logits(there))
    with pytest.raises(CapacityError):
        engine.reserve(65)
    with pytest.raises(IdentityError, match="static_tokens"):
        engine.identity.check(engine_of(family).identity)


def test_states_of_other_weights_dtypes_and_configurations_are_others() -> None:
    engine = engine_of("llama")
    engine.identity.check(engine_of("llama").identity)
    with pytest.raises(IdentityError, match="weights_digest"):
        engine.identity.check(TransformersEngine(tiny_model("llama", seed=1), block_tokens=16).identity)
    with pytest.raises(IdentityError, match="rounding"):
        engine.identity.check(engine_of("llama", "bfloat16").identity)
    other = tiny_model("llama")
    other.config.rms_norm_eps *= 2
    with pytest.raises(IdentityError, match="weights_digest"):
        engine.identity.check(TransformersEngine(other, block_tokens=16).identity)
    one_bit = tiny_model("llama")
    with torch.no_grad():
        one_bit.model.layers[1].mlp.up_proj.weight.view(torch.int32)[0, 0] ^= 1
    with pytest.raises(IdentityError, match="weights_digest"):
        engine.identity.check(TransformersEngine(one_bit, block_tokens=16).identity)


def test_a_saved_model_is_the_same_model(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path / "model")
    loaded = load_engine(tmp_path / "model", block_tokens=16)
    loaded.identity.check(engine_of("llama").identity)
    loaded.geometry.check(engine_of("llama").geometry)
    with pytest.raises(ConfigError, match="no model directory"):
        load_engine(tmp_path / "elsewhere")


def test_blocks_are_of_a_useful_size_and_whole_pools() -> None:
    assert TransformersEngine(model_of("llama")).geometry.block_tokens == 512
    assert TransformersEngine(model_of("deepseek_v4")).geometry.block_tokens % 8 == 0
    with pytest.raises(GeometryError, match="not a multiple of 8"):
        engine_of("deepseek_v4", block_tokens=12)


def test_rows_are_shared_by_what_they_are() -> None:
    """Windows and recurrent states are carries; keys, values, indexer and pooled rows are rows."""
    kinds = {part.name: part.kind for part in engine_of("deepseek_v4").geometry.parts}
    rows = {name for name, kind in kinds.items() if kind is PartKind.ROWS}
    assert rows == {"compressed_kv.compressor", "compressed_kv.compressor.2", "compressed_kv.indexer"}
    kinds = {part.name: part.kind for part in engine_of("qwen4_exp", "bfloat16").geometry.parts}
    rows = {name for name, kind in kinds.items() if kind is PartKind.ROWS}
    assert rows == {"keys", "values", "indexer_keys", "indexer_position_ids"}


@pytest.mark.parametrize("family", ["llama", "jamba", "bamba", "minimax"])
def test_a_prompt_in_pieces_is_the_prompt(family: str) -> None:
    """Bamba begins at position 0 again unless it is told where it is; Jamba forgets its state before several tokens."""
    engine = engine_of(family)
    assert engine.goes_on_in_chunks == (family != "jamba")
    assert engine.step_drift < 1e-4
    whole, pieces = (running(engine, PROMPT[:cut]) for cut in (len(PROMPT), 20))
    engine.extend(pieces, PROMPT[20:])
    assert torch.allclose(engine.logits(whole), engine.logits(pieces), atol=1e-4)


# -- what is refused


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="training"):
        TransformersEngine(copy.deepcopy(model_of("llama")).train())


def test_adapters_that_can_be_switched_and_several_ranks_are_refused() -> None:
    for attribute, value, why in (("_hf_peft_config_loaded", True, "merge"), ("_tp_size", 2, "2 ranks")):
        model = copy.deepcopy(model_of("llama"))
        setattr(model, attribute, value)
        with pytest.raises(ConfigError, match=why):
            TransformersEngine(model)


def test_another_version_of_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.24.0")
    with pytest.raises(ConfigError, match=r"5\.24\.0"):
        engine_of("llama")


def test_state_on_a_module_is_refused_and_named() -> None:
    model = copy.deepcopy(model_of("llama"))
    attention = model.model.layers[1].self_attn
    attention.seen = 0

    def count(module: Any, args: Any, output: Any) -> None:
        module.seen += 1

    attention.register_forward_hook(count)
    with pytest.raises(StateError, match=r"model\.layers\.1\.self_attn\.seen"):
        TransformersEngine(model, block_tokens=16)


def test_a_buffer_that_is_written_in_place_is_refused_and_named() -> None:
    model = copy.deepcopy(model_of("llama"))
    model.model.register_buffer("memory", torch.zeros(4))

    def write(module: Any, args: Any, output: Any) -> None:
        module.memory.add_(1)

    model.model.register_forward_hook(write)
    with pytest.raises(StateError, match=r"model\.memory"):
        TransformersEngine(model, block_tokens=16)


def test_a_model_that_keeps_state_out_of_sight_is_refused() -> None:
    """Not on a module, not in a cache: the copy goes on otherwise, and that shows."""
    model = copy.deepcopy(model_of("llama"))
    hidden = [torch.zeros(32)]

    def remember(module: Any, args: Any, output: Any) -> Any:
        hidden[0] = 0.5 * hidden[0] + output[0, -1]
        return output + hidden[0]

    model.model.norm.register_forward_hook(remember)
    with pytest.raises(StateError, match="keeps state elsewhere"):
        TransformersEngine(model, block_tokens=16)


def test_dynamic_rope_is_refused() -> None:
    model = copy.deepcopy(model_of("llama"))
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match="dynamic RoPE"):
        TransformersEngine(model)


def test_a_model_without_a_cache_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32
    )
    with pytest.raises(ConfigError, match="no decoder"):
        TransformersEngine(transformers.BertForSequenceClassification(config).eval())
    with pytest.raises(ConfigError, match="gives back no past_key_values"):
        TransformersEngine(transformers.BertLMHeadModel(config).eval())


def test_a_model_that_keeps_its_state_in_its_modules_is_refused() -> None:
    config = transformers.RecurrentGemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        lru_width=32,
        attention_window_size=9,
    )
    with pytest.raises(ConfigError, match="gives back no past_key_values"):
        TransformersEngine(transformers.RecurrentGemmaForCausalLM(config).eval())


def filled(model: Any, cache: Any = None, batch: int = 1, mask: Any = None) -> Any:
    """A cache that the model filled over 20 tokens."""
    ids = torch.arange(3, 23)[None].repeat(batch, 1)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).past_key_values


def test_padded_prompts_are_refused() -> None:
    engine = engine_of("llama")
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, :3] = 0
    free = engine.bytes_free()
    with pytest.raises(StateError, match="padded"):
        engine.adopt(filled(engine.model, mask=mask), 20, 32, mask)
    assert engine.bytes_free() == free


def test_several_sequences_in_one_cache_are_refused() -> None:
    engine = engine_of("llama")
    with pytest.raises(StateError, match="2 sequences"):
        engine.adopt(filled(engine.model, batch=2), 20, 32)


def test_a_cache_that_stands_elsewhere_is_refused() -> None:
    for family in ("llama", "gemma3", "deepseek_v4"):
        engine = engine_of(family)
        with pytest.raises(LockstepError):
            engine.adopt(filled(engine.model), 21, 32)
        one_layer_ahead = filled(engine.model)
        layer = one_layer_ahead.layers[1]
        layer.update(layer.keys[:, :, -1:], layer.values[:, :, -1:])
        with pytest.raises(LockstepError, match="layer 1"):
            engine.adopt(one_layer_ahead, 20, 32)


def test_a_cache_of_another_model_is_refused() -> None:
    engine = engine_of("llama")
    with pytest.raises(StateError, match="layers, not 2"):
        engine.adopt(filled(model_of("qwen3_5")), 20, 32)
    with pytest.raises(StateError, match="LinearAttention"):
        engine_of("qwen3_5").adopt(filled(model_of("zamba2")), 20, 32)


def test_foreign_layers_attributes_and_settings_are_refused_and_named() -> None:
    class MyLayer(transformers.cache_utils.DynamicLayer):
        pass

    model = model_of("llama")
    with pytest.raises(StateError, match="MyLayer"):
        CacheLayout(filled(model, transformers.Cache(layers=[MyLayer(), MyLayer()])), 20)
    mine = transformers.DynamicCache(layers := None, config=model.config)
    assert layers is None
    mine.layers[0] = MyLayer()
    with pytest.raises(StateError, match="MyLayer"):
        CacheLayout(filled(model, mine), 20)
    extra = filled(model)
    extra.layers[1].votes = 3
    with pytest.raises(StateError, match=r"layer 1.*votes"):
        CacheLayout(extra, 20)
    recording = transformers.DynamicCache(config=model_of("gemma3").config)
    recording.activate_past_recording()
    with pytest.raises(StateError, match="record_past"):
        engine_of("gemma3").adopt(filled(model_of("gemma3"), recording), 20, 32)


def test_quantised_and_draft_caches_are_refused_by_name() -> None:
    model = model_of("llama")
    quantised = transformers.QuantizedCache("fp8", model.config)
    with pytest.raises(StateError, match="Fp8QuantizedLayer"):
        CacheLayout(filled(model, quantised), 20)
    with pytest.raises(StateError, match="MtpCache"):
        CacheLayout(transformers.cache_utils.MtpCache(config=model.config), 20)


def test_every_layer_class_of_the_installed_version_is_known_or_named_as_left_out() -> None:
    """A new class in a new release shows here before anyone's state is lost."""
    from tiered_cache.engines.transformers import plans

    everything = set()
    pending = [transformers.cache_utils.CacheLayerMixin, transformers.cache_utils.LinearAttentionCacheLayerMixin]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__ == "transformers.cache_utils" and not kind.__abstractmethods__:
            everything.add(kind.__qualname__)
    known = {name.rsplit(".", 1)[1] for name in plans._LAYERS if name.startswith("transformers.cache_utils")}
    left_out = {"QuantoQuantizedLayer", "HQQQuantizedLayer", "Fp8QuantizedLayer"}
    assert everything - known == left_out
