import checkpoints
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktforge import CheckpointError
from ktforge.model.config import EXPERT_COUNT, EXPERT_SIZE, HIDDEN_SIZE, LAYER_COUNT, read_model_config


@pytest.mark.parametrize("name", EXPERT_COUNT)
def test_the_expert_count_goes_by_many_names(name):
    config = checkpoints.config()
    config[name] = config.pop("num_experts")
    assert read_model_config(config).experts == checkpoints.EXPERTS


def test_names_that_disagree_are_refused():
    with pytest.raises(CheckpointError, match="num_experts is 4 but num_local_experts is 8: remove the wrong one"):
        read_model_config(checkpoints.config(num_local_experts=8))


def test_the_expert_size_is_the_intermediate_size_where_there_is_no_other():
    config = checkpoints.config(intermediate_size=384)
    del config["moe_intermediate_size"]
    assert read_model_config(config).expert_size == 384


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"first_k_dense_replace": 3}, {3, 4, 5, 6, 7}),
        ({"decoder_sparse_step": 2}, {1, 3, 5, 7}),
        ({"mlp_only_layers": [0, 6]}, {1, 2, 3, 4, 5, 7}),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, {2, 4, 6}),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1, 0, 1]}, {1, 2, 4, 5, 7}),
        ({"mlp_layer_types": ["dense", *["sparse"] * 7]}, {1, 2, 3, 4, 5, 6, 7}),
        ({"moe_layers": [1, 5]}, {1, 5}),
        ({"moe_layers_enum": "3,4, 5"}, {3, 4, 5}),
        ({"interleave_moe_layer_step": 2}, {1, 3, 5, 7}),
        ({"num_dense_layers": 2}, {2, 3, 4, 5, 6, 7}),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, {1, 3, 5, 7}),
        ({"moe_layer_interval": 4, "moe_layer_start_index": 1}, {3, 7}),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": 5}, {2, 3, 4, 5}),
    ],
)
def test_layers_without_experts(changes, layers):
    assert read_model_config(checkpoints.config(num_hidden_layers=8, **changes)).moe_layers == layers


@pytest.mark.parametrize("value", [-1, 10**30, "7168", 1.5, True, [1]])
def test_sizes_that_make_no_sense_are_refused_together(value):
    with pytest.raises(CheckpointError) as caught:
        read_model_config(checkpoints.config(hidden_size=value, num_hidden_layers=value))
    assert [p.split()[1] for p in caught.value.problems] == ["num_hidden_layers", "hidden_size"]


def test_missing_fields_are_named():
    with pytest.raises(CheckpointError) as caught:
        read_model_config({"num_experts": 8})
    for problem, name in zip(caught.value.problems, (LAYER_COUNT, HIDDEN_SIZE, EXPERT_SIZE), strict=True):
        assert problem.startswith(f"config.json has no {name[0]}, nor one of its other names ({', '.join(name[1:])})")
        assert problem.endswith(f'and the tensors do not tell: add "{name[0]}" to config.json')


words = st.text("ab7\0é", max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
LAYER_FIELDS = ["first_k_dense_replace", "moe_layer_freq", "moe_layers", "mlp_layer_types"]
FIELDS = [*checkpoints.config(), *LAYER_FIELDS, "text_config", "n_routed_experts"]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_config_is_read_or_refused(changes):
    try:
        model = read_model_config({**checkpoints.config(), **changes})
    except CheckpointError as error:
        assert error.problems
    else:
        assert all(0 <= layer < model.layers for layer in model.moe_layers)


def test_experts_of_more_than_one_size_are_refused_for_that():
    """ERNIE 4.5 VL has experts for text and smaller ones for pictures."""
    with pytest.raises(CheckpointError) as caught:
        read_model_config(checkpoints.config(moe_intermediate_size=[1536, 512]))
    assert caught.value.problems == (
        "config.json: moe_intermediate_size is [1536, 512]: a model with experts of more than one size cannot be "
        "converted",
    )
