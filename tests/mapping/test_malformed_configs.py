"""Malformed configurations: refused by name, or the mapping of the configuration as it was."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import json
import random
import resource
import signal
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from published_configs import CONFIGS, make

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.cli import main

LONGEST_SECONDS = 20  # of one configuration; it says that none hangs
MOST_BYTES = 512 << 20  # that memory grows by, over all of them

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, 7, 64, -1, -8, 200_000, 10**9, 10**18, -(10**18), 10**400),
    *(0.0, -0.0, 0.5, 4.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "8", "null", "true", "fp8", "llama3", "\ud800", "\x1b[2J", "re:(", "a" * 100_000),
    *([], [[]], [0], [None], [-1], ["a"], [1.5], [2, 2], [{}], ["re:("], [10**9] * 10_000),
    *({}, {"a": 1}, {"rope_type": 1}, {"quant_method": []}, {"weights": {}}, {"": {"": ""}}),
)
KEYS = (
    *("head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters", "layer_types"),
    *("quantization_config", "compression_config", "text_config", "mlp_only_layers"),
    *("decoder_sparse_step", "num_nextn_predict_layers", "n_shared_experts", "architectures"),
    *("query_pre_attn_scalar", "num_experts", "num_local_experts", "n_routed_experts"),
    *("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "first_k_dense_replace"),
    *("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_type", "type"),
    *("quant_method", "weight_block_size", "config_groups", "weights", "group_size", "ignore"),
    *("num_bits", "format", "strategy", "symmetric", "modules_to_not_convert"),
)


class Case(NamedTuple):
    """A well-formed configuration beside its checkpoint, and what it gives."""

    folder: Any
    config: dict[str, Any]
    expected: dict[tuple[str, bool | None], tuple[osl.Mapping, str]]


def options(config):
    family = config["model_type"].removesuffix("_text")
    targets = [name for name, families in osl.families.TARGETS.items() if family in families]
    return [(target, scan) for target in targets for scan in (None, False)]


def result(mapping, folder):
    """All that a mapping says of a checkpoint."""
    mapping.abstract(folder)
    return mapping.explain(folder)


@functools.lru_cache
def values(mapping, folder):
    leaves = jax.tree_util.tree_leaves_with_path(osl.load(folder, mapping=mapping))
    return {str(path): (leaf.dtype, np.asarray(leaf).tobytes()) for path, leaf in leaves}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    cases_by_name = {}
    for name in CONFIGS:
        folder = tmp_path_factory.mktemp(name)
        config = make(name, folder)
        mappings = {
            c: osl.families.mapping(folder, target=c[0], scan=c[1]) for c in options(config)
        }
        expected = {c: (mapping, result(mapping, folder)) for c, mapping in mappings.items()}
        cases_by_name[name] = Case(folder, config, expected)
    return cases_by_name


def places(value, path=()):
    """The paths to all values of a configuration."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        children = enumerate(value)
    for key, child in children:
        yield from places(child, (*path, key))


def near(value, rng):
    """A value that looks like another."""
    nearby = [str(value), [value], {"value": value}]
    if isinstance(value, int | float):
        nearby += [value + 1, value - 1, value * 2, -value, value // 2, float(value), bool(value)]
    if isinstance(value, str):
        nearby += [value.upper(), value + " ", value[:-1], value.encode().hex()]
    if isinstance(value, list | dict) and value:
        nearby += [value * 2 if isinstance(value, list) else [*value.items()], len(value)]
    return rng.choice(nearby)


def mutate(config, rng):
    """Another configuration, and the path that changed."""
    changed = copy.deepcopy(config)
    roots = [changed, *(value for value in changed.values() if isinstance(value, dict))]
    if rng.random() < 0.2:
        owner, key = rng.choice(roots), rng.choice(KEYS)
    else:
        paths = [*places(changed)]
        read = [path for path in paths if not {*KEYS}.isdisjoint(path)]
        path = rng.choice(read if rng.random() < 0.7 else paths)
        owner, key = changed, path[-1]
        for step in path[:-1]:
            owner = owner[step]
    if rng.random() < 0.1 and (isinstance(owner, list) or key in owner):
        del owner[key]
        return changed, key, "left out"
    known = isinstance(owner, list) or key in owner
    close = known and rng.random() < 0.4
    owner[key] = near(owner[key], rng) if close else copy.deepcopy(rng.choice(VALUES))
    return changed, key, owner[key]


def spoil(text, rng):
    """Bytes that are no JSON, or other JSON than they were."""
    data = bytearray(text.encode())
    where = rng.randrange(len(data))
    match rng.randrange(6):
        case 0:
            return bytes(data[:where])
        case 1:
            data[where] = rng.randrange(256)
        case 2:
            data[where:where] = rng.randbytes(rng.randrange(1, 9))
        case 3:
            depth = rng.choice((100, 900, 100_000))
            return b'{"x":' * depth + bytes(data) + b"}" * depth
        case 4:
            depth = rng.choice((100, 900, 100_000))
            nested = b"[" * depth + b"]" * depth
            return bytes(data[:-1]) + b', "quantization_config": ' + nested + b"}"
        case 5:
            digits = str(rng.randrange(10)) * rng.choice((20, 400, 5000))
            return bytes(data[:-1]) + f', "num_hidden_layers": 1{digits}}}'.encode()
    return bytes(data)


# What may be another model that the same tensors fit: by type, not by what was there.
def is_another_model(key, value):
    match key:
        case "query_pre_attn_scalar":
            return value == "left out" or (type(value) in (int, float) and 0 < value < 1e30)
        case "rope_type" | "type":
            return value in ("llama3", "left out", "type", "default")
        case "rope_scaling" | "rope_parameters":
            # An object without a type is one of the default type, in transformers, too.
            untyped = type(value) is dict and not {"type", "rope_type"} & {*value}
            return value in (None, "left out") or untyped
        case "tie_word_embeddings":
            return type(value) is bool or value in (None, "left out")
        case "model_type":
            return isinstance(value, str)
    return False


def attempt(case, config, folder, choice):
    """Return what became of one configuration: refused, as before, or what else there is."""
    target, scan = choice
    try:
        mapping = osl.families.mapping(config, target=target, scan=scan)
        text = result(mapping, folder)
    except osl.SafetensorsLayoutError as error:
        return "refused" if len(str(error)) < 50_000 else "refused at length"
    right, expected = case.expected[choice]
    if text == expected:
        return "accepted"
    # Formats that the family's rules do not have are told by names and dtypes of tensors.
    if ".over(" in repr(mapping) and values(mapping, folder) == values(right, folder):
        return "accepted"
    return "different"


def inspected(folder):
    """`inspect` of it, as a user sees it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(["inspect", str(folder)])
    out.flush()
    assert code == 0, out.buffer.getvalue().decode()
    assert b"\x1b" not in out.buffer.getvalue()
    assert len(out.buffer.getvalue()) < 20_000


class TooLong(BaseException):
    pass


@contextlib.contextmanager
def limited():
    def ring(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def try_many(cases, seed, count, tmp_path):
    rng, counts, wrong = random.Random(seed), collections.Counter(), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        name = rng.choice([*cases])
        case = cases[name]
        choice = rng.choice([*case.expected])
        file = case.folder / "config.json"
        config, key, value = mutate(case.config, rng)
        text = json.dumps(config)
        data = spoil(text, rng) if (spoiled := rng.random() < 0.15) else text.encode()
        file.write_bytes(data)
        as_dict = not spoiled and rng.random() < 0.3
        try:
            with limited():
                outcome = attempt(case, config if as_dict else case.folder, case.folder, choice)
                if number % 4 == 0:
                    inspected(case.folder)
        except TooLong:
            outcome = "hanging"
        except Exception as error:
            outcome = f"raw {type(error).__name__}"
        if outcome == "different" and (spoiled or is_another_model(key, value)):
            outcome = "another model"
        counts[outcome] += 1
        if outcome not in ("refused", "accepted", "another model"):
            wrong.append((seed, number, name, choice, key, repr(value)[:60], outcome))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return counts, wrong, grown


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"head_dim": "8"}, "'head_dim' of the configuration is '8'"),
        ("llama", {"head_dim": 0}, "'head_dim' of the configuration is 0"),
        ("llama", {"num_hidden_layers": True}, "'num_hidden_layers' of the configuration is True"),
        ("llama", {"num_hidden_layers": 200_000}, "is 200000"),
        ("llama", {"num_hidden_layers": 1000}, "disagree on the number of layers"),
        ("llama", {"tie_word_embeddings": "false"}, "expected: true or false"),
        ("llama", {"rope_scaling": -1}, "a 'rope_scaling' that is not an object"),
        ("llama", {"rope_scaling": {"type": 3}}, "'rope_scaling.type' of the configuration is 3"),
        ("llama", {"quantization_config": "fp8"}, "a 'quantization_config' that is not an object"),
        ("llama", {"text_config": "x"}, "a 'text_config' that is not an object"),
        ("llama", {"num_attention_heads": 16}, "does not fit"),
        ("llama", {"vocab_size": 127}, "does not fit"),
        ("qwen3_moe", {"num_experts": 10**9}, "is 1000000000"),
        ("qwen3_moe", {"num_experts": 512}, "disagree on the number of experts"),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 0},
            "'decoder_sparse_step' of the configuration is 0",
        ),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "'mlp_only_layers' of the configuration is -1"),
        ("gemma2", {"query_pre_attn_scalar": float("nan")}, "is nan"),
        ("gemma2", {"hidden_size": 65}, "does not fit"),
        ("mixtral", {"num_attention_heads": 10**9}, "an integer in 1..64"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 17]}},
            "powers of two",
        ),
    ],
)
def test_messages(cases, name, changes, message):
    case = cases[name]
    (case.folder / "config.json").write_text(json.dumps(case.config | changes))
    with pytest.raises(osl.MappingError, match=message):
        osl.families.mapping(case.folder).bind(case.folder)


def test_rotary_embeddings_that_maxtext_may_not_have(cases):
    config = cases["llama"].config | {"rope_scaling": {"rope_type": "ntk"}}
    osl.families.mapping(config)
    with pytest.raises(osl.MappingError, match="no rotary embedding of the configuration"):
        osl.families.mapping(config, target="maxtext")


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_local_and_global_layers_in_another_order(cases, name):
    """MaxText's layers have names of their own for each; the tensors alone would fit."""
    config = cases[name].config
    turned = config | {"layer_types": config["layer_types"][::-1]}
    osl.families.mapping(turned)
    with pytest.raises(osl.MappingError, match="type of layer 0 is not that of MaxText"):
        osl.families.mapping(turned, target="maxtext")
    with pytest.raises(osl.MappingError, match=r"one for each of \d layers"):
        osl.families.mapping(config | {"layer_types": ["full_attention"]})


def test_what_is_no_configuration():
    for config in (3, None, ["llama"]):
        with pytest.raises(osl.MappingError, match="needs a model's configuration"):
            osl.families.mapping(config)


def test_large_files_are_not_read(tmp_path):
    (tmp_path / "config.json").write_bytes(b" " * (9 << 20))
    with pytest.raises(osl.FormatError, match="configuration is too large"):
        osl.families.mapping(tmp_path)


def test_a_malformed_regular_expression(cases):
    config = copy.deepcopy(cases["kimi"].config)
    config["quantization_config"]["ignore"] = ["re:("]
    with pytest.raises(osl.MappingError, match=r"'quantization_config\.ignore' of the config"):
        osl.families.mapping(config)


def test_malformed_configurations(cases, tmp_path):
    counts, wrong, grown = try_many(cases, 12, 300, tmp_path)
    assert wrong == []
    assert counts["refused"] > 100
    assert grown < MOST_BYTES


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_many_malformed_configurations(cases, tmp_path, seed):
    counts, wrong, grown = try_many(cases, seed, 1_000, tmp_path)
    print(counts)
    assert wrong == []
    assert grown < MOST_BYTES
