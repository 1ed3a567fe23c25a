"""Which weights of a model are quantised, name by name."""

import pytest
from checkpoints import BF16
from ktforge_plugins import Int4, Int8

from ktforge import Rule, TensorSpec, UnitSpec
from ktforge.planning.targets import Targets


def chosen(name, *rules, dense=True, shape=(64, 64), expert=None):
    unit = UnitSpec(name.removesuffix(".weight"), {"weight": TensorSpec(name, BF16, shape)}, 0, expert)
    if expert is not None:
        unit = UnitSpec("e", {"gate.weight": TensorSpec(name, BF16, shape)}, 0, expert)
    ((quantizer, of),) = Targets(DEFAULT, rules, dense).split(unit)
    assert of is unit
    return quantizer


DEFAULT, OTHER = Int4(), Int8()
KEPT = [
    "lm_head.weight", "model.lm_head.weight", "score.weight", "classifier.weight", "model.embed_tokens.weight",
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "transformer.wte.weight", "wte.weight",
    "transformer.wpe.weight", "model.embeddings.word_embeddings.weight", "patch_embedding.weight",
]  # fmt: skip
ROUTERS = [
    "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.router.weight", "model.layers.0.mlp.gate.wg.weight",
    "model.layers.0.mlp.shared_expert_gate.weight", "model.layers.0.ffn.moe_gate.weight",
    "model.layers.0.mlp.expert_gate.weight", "model.layers.0.mlp.switch_gate.weight",
    "model.layers.0.mlp.my_router2.weight",
]  # fmt: skip
LINEAR = [
    "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.w1.weight",
    "transformer.h.0.mlp.c_fc.weight", "model.layers.0.self_attn.scores_proj.weight", "my_lm_head_too.dense.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_dense_model_keeps_these_unless_a_rule_names_them(name):
    assert chosen(name) is None
    assert chosen(name, Rule(match=name, quantizer=OTHER)) is OTHER


@pytest.mark.parametrize("name", LINEAR)
def test_a_dense_model_quantises_these_unless_a_rule_keeps_them(name):
    assert chosen(name) is DEFAULT
    assert chosen(name, dense=False) is None
    assert chosen(name, Rule(match=name, quantizer=None)) is None
    assert chosen(name, shape=(64,)) is None and chosen(name, shape=(2, 8, 8)) is None


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dense", [True, False])
def test_a_router_is_kept_whatever_the_rules_say(name, dense):
    assert chosen(name, Rule(match="*", quantizer=OTHER), dense=dense) is None


def test_experts_are_quantised_whatever_they_are_called():
    for name in (*KEPT, *ROUTERS, *LINEAR):
        assert chosen(name, dense=False, expert=0) is DEFAULT


def test_the_first_rule_that_matches_wins_and_the_others_are_unused():
    rules = tuple(Rule(match=m, quantizer=q) for m, q in (("*.w1.*", None), ("*", OTHER), ("*.w2.*", DEFAULT)))
    targets = Targets(DEFAULT, rules, dense=True)
    for name, wanted in (("a.w1.weight", None), ("a.w2.weight", OTHER), ("a.w3.weight", OTHER)):
        ((quantizer, _),) = targets.split(UnitSpec("a", {"weight": TensorSpec(name, BF16, (8, 8))}))
        assert quantizer is wanted
    assert targets.unused() == ["*.w2.*"] and targets.fresh().unused() == ["*.w1.*", "*", "*.w2.*"]
