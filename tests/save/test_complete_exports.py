"""Exports open in transformers without a touch: weights, configuration and tokenizer."""

import itertools
import json
import os
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from family_models import make
from programs import run_processes
from sampling import every

import orbax_safetensors_layout as osl

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch and transformers

WORDS = ["<pad>", "<eos>", "<bos>", "<unk>", "the", "cat", "sat", "on", "mat"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
MODELS = {
    "dense": ("qwen3", "", {}),
    "dense in float32": ("qwen3", "", {}),
    "experts": ("mixtral", "", {}),
    "quantised": ("llama", "int4", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}),
}


def save_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of each, as `save_pretrained` leaves it, with code and notes beside."""
    saved = {}
    for name, _, more in MODELS.values():
        if name not in saved:
            folder = tmp_path_factory.mktemp(name)
            saved[name] = make(name, folder, **more)
            save_tokenizer(folder)
            (folder / "modeling_own.py").write_text("raise SystemExit")
    return saved


def side_files(folder):
    others = ("model", "orbax_safetensors_layout", "_METADATA", "commit_success")
    return {name for name in os.listdir(folder) if not name.startswith(others)}


def check(folder, source, *, dtype=None, plain=None):
    """The folder opens as a user would open it; tokens and logits are those of the source."""
    assert side_files(folder) == side_files(source.folder) - {"modeling_own.py"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    if dtype is not None:
        assert model.dtype == dtype
    encoded = tokenizer("the cat sat on the mat", return_tensors="pt").input_ids
    assert encoded.tolist() == [[4, 5, 6, 7, 4, 8]]
    assert tokenizer.chat_template == TEMPLATE
    expected = transformers.AutoModelForCausalLM.from_pretrained(source.folder, dtype=model.dtype)
    if plain is not None:
        assert expected.load_state_dict(plain)
    with torch.no_grad():
        theirs, ours = expected.eval()(encoded).logits, model(encoded).logits
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize(("case", "processes"), every(2, itertools.product(MODELS, (1, 2, 4))))
def test_exports_open_in_transformers(models, tmp_path, case, processes):
    name, quantize, _ = MODELS[case]
    source, target = models[name], tmp_path / "out"
    wide = case == "dense in float32"
    run_processes(
        "export_model.py",
        processes=processes,
        devices=2,
        path=str(source.folder),
        target=str(target),
        quantize=quantize,
        dtype="float32" if wide else None,
    )
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == ("float32" if wide else "bfloat16")
    plain = None
    if quantize:
        assert config["quantization_config"]["quant_method"] == "compressed-tensors"
        decoded = osl.load(target, mapping=osl.dequantized(target)).items()
        plain = {n: torch.from_numpy(np.asarray(a, np.float32)).bfloat16() for n, a in decoded}
    check(target, source, dtype=torch.float32 if wide else torch.bfloat16, plain=plain)


def trained(params, step):
    return jax.tree.map(lambda leaf: leaf * (1 + 2.0**-step), params)


def weights_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return model.model.layers[1].mlp.down_proj.weight.detach().float().numpy()


def down(params):
    kernel = params["layers.mlp.down_proj.kernel"][1]
    return np.asarray(kernel, np.float32).T


def test_every_second_step_of_a_checkpoint_manager_is_exported(models, tmp_path):
    source = models["qwen3"]
    mapping = osl.families.mapping(source.folder)
    params = jax.tree.map(jax.numpy.asarray, osl.load(source.folder, mapping=mapping))
    export = osl.SafetensorsCheckpointHandler(
        mapping=mapping, write=osl.WriteOptions(model=source.folder)
    )
    handlers = {"state": osl.SafetensorsCheckpointHandler(), "hf": export}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        for step in range(1, 5):
            state = {"params": trained(params, step), "step": step}
            items = {"state": osl.SafetensorsSave(state)}
            if step % 2 == 0:
                items["hf"] = osl.SafetensorsSave(state["params"])
            manager.save(step, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
        assert manager.latest_step() == 4
        latest = manager.restore(4, args=ocp.args.Composite(state=osl.SafetensorsRestore()))
    assert latest["state"]["step"] == 4
    for step in range(1, 5):
        assert (tmp_path / str(step) / "hf").exists() == (step % 2 == 0)
    for step in (2, 4):
        folder = tmp_path / str(step) / "hf"
        assert side_files(source.folder) - {"modeling_own.py"} <= side_files(folder)
        np.testing.assert_array_equal(weights_of(folder), down(trained(params, step)))
        transformers.AutoTokenizer.from_pretrained(folder)


def test_the_best_step_of_a_checkpoint_manager_is_exported(models, tmp_path):
    """Its folder is the one that Orbax keeps, and opens; the card says why."""
    source = models["qwen3"]
    mapping = osl.families.mapping(source.folder)
    params = jax.tree.map(jax.numpy.asarray, osl.load(source.folder, mapping=mapping))
    seen = {}
    write = osl.WriteOptions(model=source.folder, card=lambda: seen)
    export = osl.SafetensorsCheckpointHandler(mapping=mapping, write=write)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.5, 5: 2.75}
    handlers = {"state": osl.SafetensorsCheckpointHandler(), "hf": export}
    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=handlers) as manager:
        best = float("inf")
        for step, loss in losses.items():
            items = {"state": osl.SafetensorsSave({"params": trained(params, step)})}
            if loss < best:
                best = loss
                seen = {"step": step, "metrics": {"loss": jax.numpy.float32(loss)}}
                items["hf"] = osl.SafetensorsSave(trained(params, step))
            manager.save(step, args=ocp.args.Composite(**items), metrics={"loss": loss})
        manager.wait_until_finished()
        assert manager.best_step() == 4
    (folder,) = tmp_path.glob("*/hf")
    assert folder == tmp_path / "4" / "hf"
    np.testing.assert_array_equal(weights_of(folder), down(trained(params, 4)))
    assert "| loss | 2.5 |" in (folder / "README.md").read_text()


@pytest.mark.parametrize("processes", [2, 4])
def test_a_checkpoint_manager_of_several_processes_exports(models, tmp_path, processes):
    source, root = models["qwen3"], tmp_path / "run"
    run_processes(
        "export_model.py",
        processes=processes,
        devices=2,
        path=str(source.folder),
        target=str(root),
        managed=True,
    )
    check(root / "1" / "hf", source)
    assert not (root / "2" / "hf").exists()
    assert osl.load(root / "2" / "state")["step"] == 2


def test_exports_beside_a_state_of_orbax_in_v1(models, tmp_path):
    source = models["qwen3"]
    mapping = osl.families.mapping(source.folder)
    params = jax.tree.map(jax.numpy.asarray, osl.load(source.folder, mapping=mapping))
    write = osl.WriteOptions(model=source.folder)
    with ocp_v1.training.Checkpointer(tmp_path, context=osl.context("hf")) as training:
        for step in range(1, 4):
            items = {"state": {"params": trained(params, step)}}
            with osl.using(mapping=mapping, write=write):
                if step == 2:
                    items["hf"] = items["state"]["params"]
                saving = training.save_checkpointables_async(step, items)
            assert saving.result()
    folder = tmp_path / "2" / "hf"
    assert not (tmp_path / "3" / "hf").exists()
    assert not list((tmp_path / "2" / "state").glob("*.safetensors"))
    np.testing.assert_array_equal(weights_of(folder), down(trained(params, 2)))
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE


def test_a_configuration_says_the_rows_that_were_written(models, tmp_path):
    source = models["qwen3"]
    for rows in (64, 96, 128):
        mapping = osl.families.mapping(source.folder, vocab_size=rows)
        params = osl.load(source.folder, mapping=mapping)
        options = osl.WriteOptions(model=source.folder)
        osl.save(tmp_path / str(rows), params, mapping=mapping, options=options)
        config = json.loads((tmp_path / str(rows) / "config.json").read_text())
        written = osl.metadata(tmp_path / str(rows))["model.embed_tokens.weight"].shape[0]
        assert config["vocab_size"] == written == min(rows, 96)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(rows))
        assert model.get_input_embeddings().weight.shape[0] == written
    unchanged = (source.folder / "config.json").read_bytes()
    assert (tmp_path / "96" / "config.json").read_bytes() == unchanged


def test_a_vocabulary_is_not_the_rows_that_an_embedding_has_besides(tmp_path):
    """Mllama's table has 8 rows more than its vocabulary, for images."""
    config = transformers.MllamaTextConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        cross_attention_layers=[1],
        pad_token_id=0,
    )
    model = transformers.MllamaForCausalLM(config).eval()
    assert model.get_input_embeddings().weight.shape[0] == 72
    model.save_pretrained(tmp_path / "model")
    options = osl.WriteOptions(model=tmp_path / "model")
    tree = osl.load(tmp_path / "model")
    osl.save(tmp_path / "out", tree, options=options)
    others = {f"model.{n}.weight": np.ones((9, 4)) for n in ("vision.embed_tokens", "mtp.lm_head")}
    osl.save(tmp_path / "more", {**tree, **others}, options=options)
    assert json.loads((tmp_path / "more" / "config.json").read_text())["vocab_size"] == 64
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 64
    again = transformers.MllamaForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)


@pytest.mark.parametrize(
    ("config", "rows"),
    [  # of ImageGPT, GLM-Image, and Marian with a vocabulary of each language
        ({"vocab_size": 13}, {"transformer.wte": 13, "lm_head": 12}),
        (
            {"text_config": {"vocab_size": 20, "vision_vocab_size": 6}},
            {"model.language_model.embed_tokens": 20, "lm_head": 6},
        ),
        (
            {"vocab_size": 10, "decoder_vocab_size": 12},
            {"model.encoder.embed_tokens": 10, "model.decoder.embed_tokens": 12, "lm_head": 12},
        ),
    ],
)
def test_a_vocabulary_stays_whose_rows_a_table_has(tmp_path, config, rows):
    tensors = {f"{name}.weight": np.ones((n, 4), np.float32) for name, n in rows.items()}
    files = {"config.json": json.dumps(config).encode()}
    osl.save(tmp_path / "out", tensors, options=osl.WriteOptions(model=files))
    assert (tmp_path / "out" / "config.json").read_bytes() == files["config.json"]


def test_the_configuration_of_a_thinker_says_what_was_written(tmp_path):
    text = {"vocab_size": 12, "dtype": "float32"}
    config = {"thinker_config": {"dtype": "float32", "text_config": text}, "talker_config": text}
    names = ("thinker.lm_head", "thinker.model.embed_tokens")
    tensors = {f"{name}.weight": np.ones((8, 4), np.float32) for name in names}
    model = {"config.json": json.dumps(config).encode()}
    options = osl.WriteOptions(model=model, dtype="bfloat16")
    osl.save(tmp_path / "out", tensors, options=options)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    after = {"vocab_size": 8, "dtype": "bfloat16"}
    assert said["thinker_config"] == {"dtype": "bfloat16", "text_config": after}
    assert said["talker_config"] == text


@pytest.mark.parametrize("how", ["save", "convert"])
def test_a_configuration_of_quantised_weights_says_rows_and_dtype(tmp_path, how):
    tensors = {
        "model.embed_tokens.weight": np.ones((8, 64), np.float32),
        "lm_head.weight": np.ones((8, 64), np.float32),
        "model.layers.0.mlp.up_proj.weight": np.ones((32, 64), np.float32),
    }
    config = {"config.json": json.dumps({"vocab_size": 12, "dtype": "float16"}).encode()}
    quantize = osl.Quantization("fp8_channel")
    if how == "save":
        options = osl.WriteOptions(model=config, dtype="bfloat16", quantize=quantize)
        osl.save(tmp_path / "out", tensors, options=options)
    else:
        osl.save(tmp_path / "in", tensors, options=osl.WriteOptions(model=config))
        options = osl.ConvertOptions(dtype="bfloat16")
        osl.convert(
            tmp_path / "in", tmp_path / "out", format="hf", quantize=quantize, options=options
        )
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["vocab_size"], said["dtype"]) == (8, "bfloat16")
    assert "quantization_config" in said


def test_files_of_a_quantisation_go_when_it_does(tmp_path):
    older = dict.fromkeys(("quant_config.json", "quantize_config.json"), b'{"bits": 4}')
    model = {"config.json": b"{}", **older}
    tree = {"up_proj.weight": np.ones((8, 8), np.float32)}
    osl.save(tmp_path, tree, options=osl.WriteOptions(model=model))
    assert not [name for name in older if (tmp_path / name).exists()]


def test_a_processor_of_two_tokenizers_comes_along(models, tmp_path):
    """As InstructBLIP's; the second is in a folder of its own, and so are further templates."""
    source, target = models["llama"].folder, tmp_path / "out"
    model = tmp_path / "model"
    shutil.copytree(source, model)
    tokenizer = save_tokenizer(model)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATE + "!"}
    images = transformers.BlipImageProcessor(size={"height": 20, "width": 20})
    processor = transformers.InstructBlipProcessor(images, tokenizer, save_tokenizer(tmp_path))
    processor.save_pretrained(model)
    assert (model / "qformer_tokenizer" / "tokenizer.json").exists()
    assert (model / "additional_chat_templates" / "tool_use.jinja").exists()
    osl.save(target, osl.load(source), options=osl.WriteOptions(model=model))
    again = transformers.InstructBlipProcessor.from_pretrained(target)
    assert again.image_processor.size == {"height": 20, "width": 20}
    for ours in (again.tokenizer, again.qformer_tokenizer):
        assert ours("the cat sat").input_ids == [4, 5, 6]
    assert again.tokenizer.chat_template == tokenizer.chat_template


def test_configurations_of_quantised_models(models, tmp_path):
    """Copies of quantised tensors keep what it says; decoded ones are said to be plain."""
    source = models["llama"].folder
    options = osl.WriteOptions(model=source, quantize=osl.Quantization("fp8_block"))
    osl.save(tmp_path / "fp8", osl.load(source), options=options)
    said = (tmp_path / "fp8" / "config.json").read_bytes()
    assert json.loads(said)["dtype"] == "bfloat16"
    options = osl.WriteOptions(model=tmp_path / "fp8")
    osl.save(tmp_path / "copied", osl.load(tmp_path / "fp8"), options=options)
    osl.convert(tmp_path / "fp8", tmp_path / "converted", format="hf")
    for name in ("copied", "converted"):
        assert (tmp_path / name / "config.json").read_bytes() == said
    decoded = osl.load(tmp_path / "fp8", mapping=osl.dequantized(tmp_path / "fp8"))
    osl.save(tmp_path / "plain", decoded, options=options)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    weight = model.model.layers[0].mlp.up_proj.weight.detach().float().numpy()
    expected = np.asarray(decoded["model.layers.0.mlp.up_proj.weight"], np.float32)
    np.testing.assert_array_equal(weight, expected)


@pytest.mark.parametrize(
    "extra",
    [
        {"model.position_ids": np.arange(8, dtype=np.int32).reshape(1, 8)},
        {"model.mask": np.ones((4, 4), bool)},
        {
            "model.layers.0.mlp.gate.weight": np.ones((4, 8), np.float32),
            "model.layers.0.mlp.gate.tid2eid": np.ones((9, 2), np.int32),  # DeepSeek-V4
        },
    ],
)
def test_a_decoded_model_with_integers_of_its_own_is_plain(models, tmp_path, extra):
    source = models["llama"].folder
    options = osl.WriteOptions(model=source, quantize=osl.Quantization("fp8_block"))
    osl.save(tmp_path / "fp8", osl.load(source), options=options)
    decoded = osl.load(tmp_path / "fp8", mapping=osl.dequantized(tmp_path / "fp8"))
    options = osl.WriteOptions(model=tmp_path / "fp8")
    osl.save(tmp_path / "plain", {**decoded, **extra}, options=options)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


@pytest.mark.parametrize(
    "codes",
    [
        {"codes": np.ones((8, 2, 1), np.int16), "codebooks": np.ones((1, 64), np.float16)},  # AQLM
        {"indices": np.ones((1, 8), np.int32), "centroids.weight": np.ones((1, 4), np.float16)},
        {"dense_weights": np.ones(8, np.int64), "row_offsets": np.ones(9, np.int32)},  # SpQR
        {"weight": np.ones((8, 2), np.int16), "tables": np.ones((4, 2), np.float16)},  # HIGGS
        {"W_q": np.ones((8, 2), np.uint8), "scale": np.ones((8, 1), np.float16)},  # HQQ
        {  # of compressed-tensors, sparse
            "compressed": np.ones((8, 8), np.float16),
            "bitmask": np.ones((8, 2), np.uint8),
            "shape": np.ones(2, np.int64),
        },
    ],
    ids=lambda codes: next(iter(codes)),
)
def test_codes_of_formats_that_are_only_copied_keep_what_is_said_of_them(tmp_path, codes):
    named = {f"model.layers.0.mlp.up_proj.{name}": value for name, value in codes.items()}
    said = {"model_type": "llama", "quantization_config": {"quant_method": "other"}}
    osl.save(tmp_path / "source", named)
    (tmp_path / "source" / "config.json").write_text(json.dumps(said))
    options = osl.WriteOptions(model=tmp_path / "source")
    osl.save(tmp_path / "saved", osl.load(tmp_path / "source"), options=options)
    osl.convert(tmp_path / "source", tmp_path / "converted", format="hf")
    for name in ("saved", "converted"):
        assert json.loads((tmp_path / name / "config.json").read_text()) == said


def test_the_dtype_of_a_model_is_never_one_of_8_bits(models, tmp_path):
    """transformers has no such default dtype."""
    source = models["llama"].folder
    options = osl.WriteOptions(model=source, dtype="float8_e4m3fn")
    osl.save(tmp_path, osl.load(source), options=options)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_conversions_say_the_dtype_that_they_write(models, tmp_path):
    source = models["qwen3"].folder
    options = osl.ConvertOptions(dtype="float32")
    osl.convert(source, tmp_path / "out", format="hf", options=options)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def tied(name, folder):
    return make(name, folder, dtype="float32", tie_word_embeddings=True)


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_a_head_of_its_own_is_not_said_to_be_tied(tmp_path, name):
    """Programs other than transformers 5 drop the head of a model that is said to be tied."""
    source = tied(name, tmp_path / "model").folder
    untied = osl.families.mapping(source, untie=True)
    params = osl.load(source, mapping=untied)
    options = osl.WriteOptions(model=source)
    params["lm_head.kernel"] = params["lm_head.kernel"] + 1
    osl.save(tmp_path / "out", params, mapping=untied, options=options)
    osl.save(tmp_path / "flat", osl.load(tmp_path / "out"), options=options)
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", params)
    osl.convert(tmp_path / "orbax", tmp_path / "converted", mapping=untied, config=source)
    for folder in ("out", "flat", "converted"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["tie_word_embeddings"] is False
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        head = model.lm_head.weight.detach().numpy().T
        np.testing.assert_array_equal(head, params["lm_head.kernel"])
        embedding = model.get_input_embeddings().weight.detach().numpy()
        np.testing.assert_array_equal(embedding, params["embed_tokens.embedding"])


def test_a_head_that_is_the_embedding_stays_tied(tmp_path):
    source = tied("llama3", tmp_path / "model").folder
    mapping, options = osl.families.mapping(source), osl.WriteOptions(model=source)
    osl.save(tmp_path / "out", osl.load(source, mapping=mapping), mapping=mapping, options=options)
    twice = osl.load(source)
    twice["lm_head.weight"] = twice["model.embed_tokens.weight"]
    osl.save(tmp_path / "twice", twice)
    shutil.copy(source / "config.json", tmp_path / "twice")
    osl.convert(tmp_path / "twice", tmp_path / "copy", format="hf")
    like = osl.families.mapping(tmp_path / "twice").like(tmp_path / "twice")
    osl.save(tmp_path / "like", osl.load(source, mapping=mapping), mapping=like, options=options)
    assert "lm_head.weight" in osl.load(tmp_path / "like")
    for folder in ("out", "copy", "like"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["tie_word_embeddings"] is True


def test_tensors_none_of_which_is_the_models_get_no_configuration_of_it(tmp_path, models):
    """Transformers would open the folder with new random weights."""
    folder = models["qwen3"].folder
    mapping = osl.families.mapping(folder)
    params = osl.load(folder, mapping=mapping)
    options = osl.WriteOptions(model=folder)
    handler = osl.SafetensorsCheckpointHandler(write=options)
    ocp.PyTreeCheckpointer().save(tmp_path / "orbax", params)
    for save in (
        lambda: osl.save(tmp_path / "out", params, options=options),
        lambda: ocp.Checkpointer(handler).save(tmp_path / "out", args=osl.SafetensorsSave(params)),
        lambda: osl.convert(tmp_path / "orbax", tmp_path / "out", config=folder),
    ):
        with pytest.raises(osl.InvalidArgumentError, match=r"no tensor has a name of the model"):
            save()
        assert not (tmp_path / "out").exists()
    osl.save(tmp_path / "out", params, mapping=mapping, options=options)  # as the hint says
    index = folder / "model.safetensors.index.json"
    alone = tmp_path / "alone"  # of files that are yet to be loaded
    alone.mkdir()
    shutil.copy(folder / "config.json", alone)
    shutil.copy(index, alone)
    with pytest.raises(osl.InvalidArgumentError, match=r"no tensor has a name of the model"):
        osl.save(tmp_path / "more", params, options=osl.WriteOptions(model=alone))
    (alone / index.name).unlink()
    osl.save(tmp_path / "more", params, options=osl.WriteOptions(model=alone))
