"""A version is made from the arrays of an earlier one, by the differences alone."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from changing_models import as_bytes, changed, history, model
from jax.sharding import NamedSharding, PartitionSpec as P
from libraries import need
from mapped_llama import path, plain_mapping, tensors  # noqa: F401
from meshes import mesh_of
from remote_checks import shown

import orbax_safetensors_layout as osl


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    return folder, history(folder, 8, whole_every=5)


@pytest.fixture
def warnings(caplog):
    caplog.set_level("WARNING", logger="absl")
    return lambda: [record.getMessage() for record in caplog.records]


def sharded(tree):
    mesh = mesh_of(x=4, y=2)

    def spec(value):
        shape = value.shape
        return P("x", "y") if len(shape) == 2 and shape[0] % 4 == shape[1] % 2 == 0 else P()

    return jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, spec(v))),
        tree,
    )


@pytest.mark.parametrize("steps", [(1, 2, 3, 4), (1, 4), (5, 6, 8), (2, 7, 7, 3)])
@pytest.mark.parametrize("kind", ["numpy", "jax", "sharded"])
def test_arrays_go_from_version_to_version(published, steps, kind, warnings):
    folder, seen = published
    into = {"numpy": None, "jax": model(), "sharded": sharded(model())}[kind]
    pulled = into
    for number in steps:
        pulled = osl.pull(folder, pulled, version=number)
        assert pulled.version == number
        assert as_bytes(pulled.tree) == seen[number]
    if kind == "sharded":
        assert {n: v.sharding for n, v in pulled.tree.items()} == {
            name: leaf.sharding for name, leaf in into.items()
        }
    assert warnings() == []


def test_nothing_but_differences_is_read(tmp_path, warnings):
    seen = history(tmp_path, 4)
    pulled = osl.pull(tmp_path, sharded(model()), version=2)
    for number in (1, 2):
        for file in (tmp_path / f"weight_v{number:06d}").glob("*.safetensors"):
            file.unlink() if number == 1 else None
    assert as_bytes(osl.pull(tmp_path, pulled).tree) == seen[4]
    assert warnings() == []


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")])
def test_replicas_on_cpu_devices_share_memory_as_loaded_ones_do(tmp_path, spec):
    sharding = NamedSharding(mesh_of(x=2, y=4), spec)
    tree = {"a": jax.device_put(np.arange(4096.0, dtype=np.float32).reshape(64, 64), sharding)}
    osl.publish(tmp_path, tree)
    held = osl.pull(tmp_path, tree)
    after = {"a": tree["a"].at[3, 5].set(-1)}
    osl.publish(tmp_path, after)

    def places(pulled):
        shards = pulled.tree["a"].addressable_shards
        return len({shard.data.unsafe_buffer_pointer() for shard in shards})

    new = osl.pull(tmp_path, held)
    assert as_bytes(new.tree) == as_bytes(after)
    assert places(new) == places(held) == (2 if "x" in spec else 1)


@pytest.mark.parametrize("donate", [False, True])
def test_what_did_not_change_stays_and_what_did_is_given_up(tmp_path, donate):
    before = {name: jnp.arange(100.0) + n for n, name in enumerate("abc")}
    osl.publish(tmp_path, before)
    held = osl.pull(tmp_path, before)
    assert osl.pull(tmp_path, held) is held
    after = {**before, "b": before["b"].at[3].set(-1)}
    osl.publish(tmp_path, after)
    new = osl.pull(tmp_path, held, donate=donate)
    assert as_bytes(new.tree) == as_bytes(after)
    assert new.tree["a"] is held.tree["a"]
    assert new.tree["c"] is held.tree["c"]
    assert held.tree["b"].is_deleted() == donate
    assert not held.tree["a"].is_deleted()


def test_an_array_that_two_leaves_share_stays(tmp_path):
    shared = jnp.arange(8.0)
    tree = {"a": shared, "b": shared}
    osl.publish(tmp_path, tree)
    after = {"a": shared + 1, "b": shared}
    osl.publish(tmp_path, after)
    new = osl.pull(tmp_path, osl.Pulled(1, tree), donate=True)
    assert as_bytes(new.tree) == as_bytes(after)


def test_leaves_that_are_left_out_stay_so(tmp_path):
    tree = model()
    osl.publish(tmp_path, tree)
    held = osl.pull(tmp_path, {**tree, "layer.0.weight": ...})
    after = changed(tree, 3, few=1)
    osl.publish(tmp_path, after)
    new = osl.pull(tmp_path, held).tree
    assert new.pop("layer.0.weight") is ...
    assert as_bytes(new) == {n: b for n, b in as_bytes(after).items() if n != "layer.0.weight"}


def other_bit(tree):
    return tree | {"layer.0.weight": tree["layer.0.weight"].at[0, 0].add(1)}


def cast(tree):
    return tree | {"layer.0.weight": tree["layer.0.weight"].astype(jnp.bfloat16)}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_bit, "not what was published as version 2"),
        (cast, "or cast"),
    ],
)
def test_arrays_that_are_not_what_was_published_are_loaded(
    tmp_path, spoil, message, donate, warnings
):
    tree = {name: leaf for name, leaf in model().items() if "0" in name or "1" in name}
    osl.publish(tmp_path, tree)
    after = {name: (value * 2).astype(value.dtype) for name, value in tree.items()}
    osl.publish(tmp_path, after)
    held = osl.Pulled(1, spoil(tree))
    expected = {name: after[name].astype(held.tree[name].dtype) for name in after}
    new = osl.pull(tmp_path, held, donate=donate)
    assert as_bytes(new.tree) == as_bytes(expected)
    assert [message in text and "loaded anew" in text for text in warnings()] == [True]


@pytest.mark.parametrize("donate", [False, True])
def test_a_damaged_difference_leaves_the_arrays(tmp_path, donate):
    tree = {"a": jnp.arange(64.0), "b": jnp.arange(32.0)}
    osl.publish(tmp_path, tree)
    osl.publish(tmp_path, jax.tree.map(lambda v: v + 1, tree))
    [file] = (tmp_path / "weight_v000002").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-20] ^= 255
    file.write_bytes(data)
    held = osl.pull(tmp_path, tree, version=1)
    with pytest.raises(osl.FormatError, match=r"difference|not what was published"):
        osl.pull(tmp_path, held, donate=donate)
    if not donate:
        assert as_bytes(held.tree) == as_bytes(tree)
    assert as_bytes(osl.pull(tmp_path, held.tree, version=1).tree) == as_bytes(tree)


@pytest.mark.parametrize("donate", [False, True])
def test_a_mapped_model_takes_the_differences(tmp_path, path, tensors, donate, warnings):  # noqa: F811
    mapping = plain_mapping()
    tree = osl.load(path, sharded(osl.load(path, mapping=mapping)), mapping=mapping)
    held = osl.Pulled(0, jax.tree.map(jnp.copy, tree))
    for number in (1, 2, 3):
        leaves, treedef = jax.tree.flatten(tree)
        leaves = [
            (v * jnp.asarray(1.01, v.dtype)).astype(v.dtype) if n % 3 != number % 3 else v
            for n, v in enumerate(leaves)
        ]
        tree = jax.tree.unflatten(treedef, leaves)
        assert osl.publish(tmp_path, tree, mapping=mapping, base=path) == number
        old = jax.tree.leaves(held.tree)
        held = osl.pull(tmp_path, held, mapping=mapping, base=path, donate=donate)
        assert held.version == number
        new, kept = jax.tree.leaves(held.tree), 0
        for n, (value, before, expected) in enumerate(zip(new, old, leaves, strict=True)):
            assert value.sharding == expected.sharding
            assert np.asarray(value).tobytes() == np.asarray(expected).tobytes()
            kept += value is before
            assert value is not before or n % 3 == number % 3  # others changed
            assert before.is_deleted() == (donate and value is not before)
        assert kept
    assert warnings() == []


def test_a_mapping_that_does_not_save_is_loaded(tmp_path, warnings):
    tree = {"a": np.arange(32, dtype=ml_dtypes.bfloat16)}
    mapping = osl.Mapping([osl.rule("b", osl.tensor("a").slice(0, 0, 16))])
    osl.publish(tmp_path, tree)
    held = osl.pull(tmp_path, mapping=mapping)
    after = {"a": tree["a"][::-1].copy()}
    osl.publish(tmp_path, after)
    new = osl.pull(tmp_path, held, mapping=mapping)
    np.testing.assert_array_equal(new.tree["b"], after["a"][:16])
    assert ["Version 2 is loaded anew" in text for text in warnings()] == [True]


def test_arrays_of_another_mapping_or_other_names_are_loaded(tmp_path, warnings):
    """None of their names would be one that differences change."""
    mapping = osl.Mapping([osl.rule("kernel", osl.tensor("w").transpose(1, 0))])
    for number in range(1, 4):
        osl.publish(tmp_path, {"kernel": jnp.full((4, 8), float(number))}, mapping=mapping)
    like = {"kernel": jnp.zeros((4, 8))}
    held = osl.pull(tmp_path, like, mapping=mapping, version=1)
    with pytest.raises(osl.MissingTensorError, match="'kernel' not found"):
        osl.pull(tmp_path, held)
    renamed = held._replace(tree={"params": held.tree})
    with pytest.raises(osl.MappingError, match=r"params\.kernel"):
        osl.pull(tmp_path, renamed, mapping=mapping)
    other = osl.Mapping([osl.rule("kernel", osl.tensor("w").reshape(4, 8))])
    pulled = osl.pull(tmp_path, held, mapping=other)
    assert len(warnings()) == 3
    assert all("pulled by another mapping or other names" in text for text in warnings())
    assert pulled.version == 3
    np.testing.assert_array_equal(pulled.tree["kernel"], np.full((4, 8), 3.0))
    np.testing.assert_array_equal(
        osl.pull(tmp_path, held, mapping=mapping).tree["kernel"], np.full((4, 8), 3.0)
    )
    assert len(warnings()) == 3  # none for the same one


def test_a_url_to_pull_into_is_refused_without_its_credentials(published):
    folder, _ = published
    with pytest.raises(osl.InvalidArgumentError, match="not 'https://host/a'") as caught:
        osl.pull(folder, "https://me:hunter2@host/a?sig=hunter2")
    assert "hunter2" not in shown(caught.value)


def test_a_version_in_a_folder_is_not_arrays(published, tmp_path):
    folder, _ = published
    pulled = osl.pull(folder, tmp_path / "own", version=3)
    with pytest.raises(osl.InvalidArgumentError, match="give the folder"):
        osl.pull(folder, pulled)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("float16", "bfloat16"),
        ("bfloat16", "float16"),
        ("float8_e4m3fn", "float8_e5m2"),
        ("float32", "int32"),
        ("int8", "float8_e4m3fn"),
        ("bfloat16", "float8_e4m3b11fnuz"),  # no dtype of files
        ("int8", "int4"),  # of one code in files, and so the next
        ("uint8", "uint4"),
        ("uint8", "float4_e2m1fn"),
    ],
)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_zeros_that_were_cast_are_loaded_anew(tmp_path, stored, asked, mapped, by_hand, warnings):
    """Zeros have the same bits in both dtypes, so the checksum would be right."""
    mapping = osl.Mapping([osl.rule("w", osl.tensor("w").transpose())]) if mapped else None
    osl.publish(tmp_path, {"w": jnp.zeros((3, 5), stored)})
    like = {"w": jnp.zeros((5, 3) if mapped else (3, 5), asked)}
    held = osl.pull(tmp_path, like, mapping=mapping)
    if by_hand:
        held = osl.Pulled(1, held.tree)
    osl.publish(tmp_path, {"w": (jnp.arange(15) % 5).reshape(3, 5).astype(stored)})
    new = osl.pull(tmp_path, held, mapping=mapping)
    assert as_bytes(new.tree) == as_bytes(osl.pull(tmp_path, like, mapping=mapping).tree)
    assert ["or cast" in text for text in warnings()] == [True]


def test_a_narrow_integer_that_no_longer_fits_is_refused(tmp_path):
    osl.publish(tmp_path, {"w": jnp.zeros(3, jnp.int8)})
    held = osl.pull(tmp_path, {"w": jnp.zeros(3, jnp.int4)})
    osl.publish(tmp_path, {"w": jnp.full(3, 10, jnp.int8)})
    for pulled in (held, osl.Pulled(1, held.tree)):
        with pytest.raises(osl.DtypeMismatchError):
            osl.pull(tmp_path, pulled)


def test_names_that_were_not_published_are_loaded_anew(tmp_path, warnings):
    """Else a leaf would stay what it was, under the number of the new version."""
    for number in (1.0, 2.0):
        osl.publish(tmp_path, {"w": jnp.full(4, number)})
    for leaf in (jnp.ones(4), jax.random.key(0), 1.0):
        with pytest.raises(osl.MissingTensorError):
            osl.pull(tmp_path, osl.Pulled(1, {"params": {"w": leaf}}))
    assert ["other names" in text for text in warnings()] == [True] * 3


def test_what_is_in_a_box_of_its_own_name_is_loaded_anew(tmp_path):
    """The tensor is 'a.value', as the publisher has a dict; the leaf is called 'a'."""
    nn = need("flax.linen")
    for number in (1.0, 2.0):
        osl.publish(tmp_path, {"a": {"value": jnp.full(4, number)}})
    held = osl.pull(tmp_path, {"a": nn.Partitioned(jnp.zeros(4), names=("x",))}, version=1)
    assert held.tree["a"].value.tolist() == [1.0] * 4
    assert osl.pull(tmp_path, held).tree["a"].value.tolist() == [2.0] * 4


def tied(folder, tree):
    config = {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 12,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    osl.save(folder, tree)
    return folder


@pytest.mark.parametrize("like", [True, False])
@pytest.mark.parametrize("head", [False, True])
def test_a_head_that_was_filled_from_the_embedding_follows_it(tmp_path, head, like, warnings):
    shapes = {
        "embed_tokens": (12, 8), "norm": (8,), "layers.0.input_layernorm": (8,),
        "layers.0.post_attention_layernorm": (8,), "layers.0.self_attn.q_proj": (8, 8),
        "layers.0.self_attn.k_proj": (4, 8), "layers.0.self_attn.v_proj": (4, 8),
        "layers.0.self_attn.o_proj": (8, 8), "layers.0.mlp.gate_proj": (16, 8),
        "layers.0.mlp.up_proj": (16, 8), "layers.0.mlp.down_proj": (8, 16),
    }  # fmt: skip
    tree = {f"model.{name}.weight": jnp.ones(shape) for name, shape in shapes.items()}
    if head:
        tree["lm_head.weight"] = tree["model.embed_tokens.weight"]
    folder = tied(tmp_path / "model", tree)
    mapping = osl.families.mapping(folder, untie=True)
    mapping = mapping.like(folder) if like else mapping
    osl.publish(tmp_path / "all", tree)
    held = osl.pull(tmp_path / "all", mapping.abstract(folder), mapping=mapping)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tree:
            tree[name] = tree[name] * 3
    osl.publish(tmp_path / "all", tree)
    new = osl.pull(tmp_path / "all", held, mapping=mapping)
    fresh = osl.pull(tmp_path / "all", held.tree, mapping=mapping)
    assert jax.tree.all(jax.tree.map(np.array_equal, new.tree, fresh.tree))
    assert np.asarray(new.tree["lm_head"]["kernel"]).tolist() == [[3.0] * 12] * 8
    assert ["loaded anew" in text for text in warnings()] == [True] * (not head)


def test_an_array_of_which_another_has_the_buffer_stays(tmp_path):
    sharding = NamedSharding(mesh_of(x=8), P("x"))
    shards = jax.device_put(jnp.arange(8.0), sharding)
    parts = [shard.data for shard in shards.addressable_shards]
    other = jax.make_array_from_single_device_arrays((8,), sharding, parts)
    tree = {"a": shards, "b": other}
    osl.publish(tmp_path, tree)
    after = {"a": shards + 1, "b": other}
    osl.publish(tmp_path, after)
    new = osl.pull(tmp_path, osl.Pulled(1, tree), donate=True)
    assert as_bytes(new.tree) == as_bytes(after)


def test_what_was_pulled_by_hand_is_known_after_one_call(tmp_path, warnings):
    trees = [{"w": jnp.full(4, number)} for number in (1.0, 2.0, 3.0, 4.0)]
    for tree in trees[:2]:
        osl.publish(tmp_path, tree)
    held = osl.pull(tmp_path, osl.Pulled(1, trees[0]))
    for tree in trees[2:]:
        osl.publish(tmp_path, tree)
    for number in (1, 2):
        shutil.rmtree(tmp_path / f"weight_v{number:06d}")
    assert as_bytes(osl.pull(tmp_path, held).tree) == as_bytes(trees[3])
    assert warnings() == []
    with pytest.raises(osl.CheckpointNotFoundError, match="needs version 2"):
        osl.pull(tmp_path, held._replace(form=None))
    assert ["needs version 2, which is missing" in text for text in warnings()] == [True]


@pytest.mark.parametrize("number", [2.0, 3.0])
def test_what_does_not_change_beside_what_does_keeps_its_bits(tmp_path, number, warnings):
    """A leaf whose rule rounds on the way back is not made again of what is left of its tensors."""
    scaled = osl.tensor("{i}.w").scale(number, lossy_inverse=True)
    mapping = osl.Mapping([osl.rule("x", osl.stack(scaled, over="i"))])
    rng = np.random.default_rng(0)
    tree = {f"{n}.w": jnp.asarray(rng.standard_normal(4000), jnp.bfloat16) for n in range(4)}
    tree["2.w"] *= 0
    osl.publish(tmp_path, tree)
    like = {"x": jnp.zeros((4, 4000), jnp.bfloat16)}
    held = osl.pull(tmp_path, like, mapping=mapping)
    osl.publish(tmp_path, tree | {"2.w": tree["2.w"] + 0.5})
    new = osl.pull(tmp_path, held, mapping=mapping)
    assert as_bytes(new.tree) == as_bytes(osl.pull(tmp_path, like, mapping=mapping).tree)
    assert ["loaded anew" in text for text in warnings()] == [True] * (number == 3)


def test_arrays_of_other_shapes_are_loaded_anew(tmp_path):
    for number in (1.0, 2.0):
        osl.publish(tmp_path, {"w": jnp.full((4, 4), number)})
    held = osl.pull(tmp_path, {"w": jnp.zeros((4, 4))}, version=1)
    for version in (1, 2):
        with pytest.raises(osl.ShapeMismatchError):
            osl.pull(tmp_path, held._replace(tree={"w": jnp.zeros(16)}), version=version)
