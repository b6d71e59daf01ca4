"""Versions of one number in two histories, odd dtypes, and folders that are not to be replaced."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from changing_models import as_bytes, model
from programs import run_processes
from published import read_version
from recording import recording

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.conversion.versions import PublishedVersions
from orbax_safetensors_layout.storage import LocalStorage


def two_histories(folder):
    """Publish a model in two folders, with another frozen tensor; return the second's trees."""
    first = {"frozen": jnp.zeros(50), "w": jnp.arange(90.0)}
    second = {**first, "frozen": jnp.ones(50)}
    after = {**second, "w": second["w"] + 1}
    osl.publish(folder / "first", first)
    osl.publish(folder / "second", second)
    osl.publish(folder / "second", after)
    return [second, after]


def published_again(folder):
    """Publish a version in the place of another; return the trees of the new one and the next."""
    tree = {"a": jnp.zeros(50), "w": jnp.arange(90.0)}
    osl.publish(folder / "first", tree)
    osl.publish(folder / "first", {**tree, "a": tree["a"] + 1})
    shutil.copytree(folder / "first", folder / "second")
    shutil.rmtree(folder / "second/weight_v000002")
    seen = [{**tree, "w": tree["w"] + 1}, {**tree, "w": tree["w"] + 2}]
    for each in seen:
        osl.publish(folder / "second", each)
    return seen


@pytest.mark.parametrize("history", [two_histories, published_again])
def test_a_version_of_another_history_is_not_taken_for_this_ones(tmp_path, history):
    seen = history(tmp_path)
    last = osl.pull(tmp_path / "second").version
    for number, expected in zip((last - 1, last), seen, strict=True):
        held = osl.pull(tmp_path / "first")
        osl.pull(tmp_path / "first", tmp_path / "own")
        assert as_bytes(osl.pull(tmp_path / "second", held, version=number).tree) == as_bytes(
            expected
        )
        osl.pull(tmp_path / "second", tmp_path / "own", version=number)
        assert read_version(tmp_path, 0, tmp_path / "own") == as_bytes(expected)


def put(source, target, number):
    """Put a version of one folder in the place of another's."""
    name = f"weight_v{number:06d}"
    shutil.rmtree(target / name, ignore_errors=True)
    shutil.copytree(source / name, target / name)


def abc(*values):
    named = zip("abc", values, strict=True)
    return {name: np.full((8, 8), value, np.float32) for name, value in named}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("into", ["arrays", "folder", "held"])
def test_versions_of_two_histories_are_not_mixed(tmp_path, number, into):
    """Also where no tensor that changes is another one."""
    for place, other in (("here", 1), ("there", 7)):
        for values in ((other, 0, 0), (other, 1, 0), (other, 1, 1)):
            osl.publish(tmp_path / place, abc(*values))
    target = {"arrays": None, "folder": tmp_path / "own"}
    if into == "held":
        target["held"] = osl.pull(tmp_path / "here", version=1)
    put(tmp_path / "there", tmp_path / "here", number)
    if into == "held" and number == 1:  # of which nothing is read
        assert as_bytes(osl.pull(tmp_path / "here", target[into]).tree) == as_bytes(abc(1, 1, 1))
        return
    with pytest.raises(osl.FormatError, match="version 2 follows another version 1 than") as caught:
        osl.pull(tmp_path / "here", target[into])
    assert caught.value.file == str(tmp_path / "here/weight_v000002")
    assert not (tmp_path / "own").exists()
    with pytest.raises(osl.FormatError, match="follows another version"):
        osl.publish(tmp_path / "here", abc(1, 1, 2))


@pytest.mark.parametrize("kind", ["folder", "one file"])
def test_a_version_is_not_of_another_base(tmp_path, kind):
    """The models differ in a tensor that no version changes; where they lie does not matter."""
    base, other = (osl.save(tmp_path / n, abc(0, 0, v)) or tmp_path / n for n, v in ("x9", "y5"))
    folder = tmp_path / "all"
    osl.publish(folder, abc(1, 0, 9), base=base)
    with pytest.raises(osl.FormatError, match="version 1 follows another model"):
        osl.publish(folder, abc(1, 1, 5), base=other)
    osl.publish(folder, abc(1, 1, 9), base=base)
    for target in (None, tmp_path / "own"):
        with pytest.raises(osl.FormatError, match="version 1 follows another model") as caught:
            osl.pull(folder, target, base=other)
        assert str(other) in caught.value.found
    moved = shutil.copytree(base, tmp_path / "moved", copy_function=shutil.copyfile)
    if kind == "one file":
        moved = shutil.move(moved / "model.safetensors", tmp_path / "alone.safetensors")
    held = osl.pull(folder, version=1, base=base)
    assert as_bytes(osl.pull(folder, held, base=moved).tree) == as_bytes(abc(1, 1, 9))


def test_versions_of_programs_that_name_no_history(tmp_path):
    folder = tmp_path / "all"
    for values in ((0, 0, 0), (1, 0, 0), (1, 1, 0)):
        osl.publish(folder, abc(*values))
    for index in folder.glob("*/*.index.json"):
        said = json.loads(index.read_text())
        for name in ("history", "base_history"):
            said["metadata"].pop(name, None)
        index.write_text(json.dumps(said))
    assert as_bytes(osl.pull(folder).tree) == as_bytes(abc(1, 1, 0))
    osl.publish(folder, abc(1, 1, 1))
    assert as_bytes(osl.pull(folder).tree) == as_bytes(abc(1, 1, 1))


def llama_like(seed=3):
    """Return a tree of as many tensors as a model's, a few of them large."""
    rng = np.random.default_rng(seed)
    tree = {f"layers.{n:03}.norm": rng.normal(size=8).astype(np.float32) for n in range(90)}
    for n in range(90):
        tree[f"layers.{n:03}.up"] = rng.normal(size=(32, 64)).astype(np.float32)
    tree["embed_tokens"] = rng.normal(size=(2000, 32)).astype(np.float32)
    tree["lm_head"] = rng.normal(size=(2000, 32)).astype(np.float32)
    return tree


def other_layer(tree):
    return {**tree, "layers.044.up": tree["layers.044.up"] + 1}


def other_rows(tree):
    rows = tree["embed_tokens"].copy()
    rows[1100:] += 1
    return {**tree, "embed_tokens": rows}


def trained_on(tree):
    return {name: value + np.float32(0.001) for name, value in tree.items()}


def other_dtype(tree):
    return {**tree, "lm_head": tree["lm_head"].view(np.int32)}


@pytest.mark.parametrize("changed", [other_layer, other_rows, trained_on, other_dtype])
def test_a_base_is_known_by_some_of_its_bytes(tmp_path, changed):
    """A few small reads, however large the model."""
    tree = llama_like()
    osl.save(tmp_path / "base", tree)
    osl.save(tmp_path / "other", changed(tree))
    new = {**tree, "layers.007.norm": tree["layers.007.norm"] * 2}
    osl.publish(tmp_path / "all", new, base=tmp_path / "base")
    with pytest.raises(osl.FormatError, match="follows another model"):
        osl.pull(tmp_path / "all", base=tmp_path / "other")
    assert as_bytes(osl.pull(tmp_path / "all", base=tmp_path / "base").tree) == as_bytes(new)


def test_the_files_of_a_whole_version_are_its_own(tmp_path):
    """One of another history beside this one's index is refused."""
    options = osl.WriteOptions(max_file_bytes=256)
    for place, value in (("here", 1), ("there", 2)):
        osl.publish(tmp_path / place, abc(value, value, value), options=options)
        osl.publish(tmp_path / place, abc(value, value, 9), options=options)
    files = sorted((tmp_path / "here/weight_v000001").glob("*.safetensors"))
    assert len(files) == 3
    shutil.copy(tmp_path / "there/weight_v000001" / files[1].name, files[1])
    with pytest.raises(osl.FormatError, match="version 2 follows another version 1"):
        osl.pull(tmp_path / "here")


def test_what_is_read_is_what_the_model_was_known_by(tmp_path, monkeypatch):
    """Also where another is put in its place just then."""
    base = tmp_path / "base"
    osl.save(base, abc(1, 1, 1))
    osl.publish(tmp_path / "all", abc(2, 1, 1), base=base)
    digest = PublishedVersions._digest

    def replaced(*args):
        found = digest(*args)
        osl.save(base, abc(1, 9, 9), overwrite=True)
        return found

    monkeypatch.setattr(PublishedVersions, "_digest", replaced)
    try:
        pulled = osl.pull(tmp_path / "all", base=base).tree
    except osl.SafetensorsLayoutError:
        return
    assert as_bytes(pulled) == as_bytes(abc(2, 1, 1))


@pytest.mark.parametrize("into", ["arrays", "folder"])
def test_what_is_held_needs_nothing_but_the_differences(tmp_path, into):
    """Not the model, nor the versions that it was made of."""
    base, folder, own = (tmp_path / name for name in ("base", "all", "own"))
    osl.save(base, abc(0, 0, 0))
    for values in ((1, 0, 0), (1, 1, 0), (1, 1, 1)):
        osl.publish(folder, abc(*values), base=base)
    held = osl.pull(folder, own if into == "folder" else None, base=base, version=2)
    shutil.rmtree(base)
    shutil.rmtree(folder / "weight_v000001")
    shutil.rmtree(folder / "weight_v000002")
    with recording() as storage:
        pulled = osl.pull(folder, own if into == "folder" else held)
    assert pulled.version == 3
    made = osl.load(own) if into == "folder" else pulled.tree
    assert as_bytes(made) == as_bytes(abc(1, 1, 1))
    if into == "arrays":
        assert {name.split("/")[-2] for name, _, _ in storage.ranges} == {"weight_v000003"}
    again = osl.pull(folder, own if into == "folder" else pulled)
    assert again.identity == pulled.identity


def test_processes_with_other_bases_publish_nothing(tmp_path):
    """Each is a copy on its host, of which one is stale."""
    for process, values in enumerate([(1, 1, 1), (1, 6, 1)]):
        osl.save(tmp_path / f"base{process}", abc(*values))
    results = run_processes("publish_bases.py", processes=2, devices=1, folder=str(tmp_path))
    for message in results:
        assert "it has something else to publish" in message
        assert "give the same model as base=" in message
    assert not list(tmp_path.glob("all/weight_*"))


def test_the_files_of_a_folder_that_others_use_stay(tmp_path):
    model, own = tmp_path / "model", tmp_path / "own"
    for folder, text in ((model, "{}"), (own, "mine")):
        folder.mkdir()
        (folder / "config.json").write_text(text)
    options = osl.WriteOptions(model=model)
    osl.publish(tmp_path / "all", abc(1, 1, 1), options=options)
    with pytest.raises(osl.CheckpointExistsError, match=r"config\.json"):
        osl.pull(tmp_path / "all", own)
    assert (own / "config.json").read_text() == "mine"
    assert [file.name for file in own.iterdir()] == ["config.json"]
    with pytest.raises(osl.InvalidArgumentError, match="is the model itself"):
        osl.pull(tmp_path / "all", tmp_path / "base", base=tmp_path / "base")


def test_weights_that_others_put_into_a_pulled_folder_stay(tmp_path):
    own = tmp_path / "own"
    for number in range(3):
        osl.publish(tmp_path / "all", abc(number, 0, 0))
        osl.pull(tmp_path / "all", own)
        adapter = {"x": np.full(3, number, np.int32)}
        safetensors.numpy.save_file(adapter, own / f"adapter_{number}.safetensors")
    osl.publish(tmp_path / "all", abc(3, 0, 0), whole_every=1)
    (own / "model.safetensors").unlink()
    osl.pull(tmp_path / "all", own)
    assert as_bytes(safetensors.numpy.load_file(own / "model.safetensors")) == as_bytes(
        abc(3, 0, 0)
    )
    for number in range(3):
        adapter = safetensors.numpy.load_file(own / f"adapter_{number}.safetensors")
        assert adapter["x"].tolist() == [number] * 3


def test_what_others_put_into_a_pulled_folder_meanwhile_stays(tmp_path, monkeypatch):
    own = tmp_path / "own"
    flush = LocalStorage.flush_folder
    index = json.dumps({"metadata": {}, "weight_map": {"x": "adapter_1.safetensors"}})

    def put(self, folder):
        flush(self, folder)
        if own.exists() and folder != str(own):
            safetensors.numpy.save_file({"x": np.ones(3)}, own / "adapter_1.safetensors")
            (own / "adapter.safetensors.index.json").write_text(index)

    monkeypatch.setattr(LocalStorage, "flush_folder", put)
    for number in range(4):
        osl.publish(tmp_path / "all", abc(number, 0, 0), whole_every=3)
        osl.pull(tmp_path / "all", own)
        assert as_bytes(osl.load(own)) == as_bytes(abc(number, 0, 0))
        if number:
            assert (own / "adapter.safetensors.index.json").read_text() == index
            assert safetensors.numpy.load_file(own / "adapter_1.safetensors")["x"].sum() == 3


def test_links_that_others_put_into_a_pulled_folder_stay(tmp_path):
    own, code = tmp_path / "own", tmp_path / "eval.py"
    code.write_text("theirs")
    for number in range(4):
        osl.publish(tmp_path / "all", abc(number, 0, 0), whole_every=3)
        osl.pull(tmp_path / "all", own)
        if not number:
            (own / "eval.py").symlink_to(code)
            (own / "README.md").symlink_to(code)
    assert (own / "eval.py").is_symlink()
    assert (own / "README.md").read_text() == "theirs"


def test_a_card_of_others_is_not_replaced_by_a_published_one(tmp_path):
    own, options = tmp_path / "own", osl.WriteOptions(card={"step": 3})
    osl.publish(tmp_path / "all", abc(0, 0, 0))
    osl.pull(tmp_path / "all", own)
    (own / "README.md").write_text("mine")
    osl.publish(tmp_path / "all", abc(1, 0, 0), whole_every=2, options=options)
    with pytest.raises(osl.CheckpointExistsError, match=r"README\.md") as caught:
        osl.pull(tmp_path / "all", own)
    assert caught.value.hint == "Move them away, or give another folder."
    assert (own / "README.md").read_text() == "mine"
    (own / "README.md").unlink()
    osl.pull(tmp_path / "all", own)
    osl.publish(tmp_path / "all", abc(2, 0, 0))
    osl.publish(tmp_path / "all", abc(3, 0, 0), whole_every=2, options=options)
    osl.pull(tmp_path / "all", own)  # its own card is
    assert "Step 3" in (own / "README.md").read_text()


@pytest.mark.parametrize("from_base", [False, True])
def test_code_and_card_of_what_was_published_come_along(tmp_path, from_base):
    """Not those of a model that is only named as the base."""
    model, own = tmp_path / "model", tmp_path / "own"
    osl.save(model, abc(0, 0, 0))
    files = {"config.json": "{}", "modeling_a.py": "pass", "README.md": "of the model"}
    for name, text in files.items():
        (model / name).write_text(text)
    options = osl.WriteOptions(model=model, code=True, card={"step": 7})
    how = {"base": model} if from_base else {"options": options}
    base = {"base": model} if from_base else {}
    for number in (1, 2, 3):
        osl.publish(tmp_path / "all", abc(number, 0, 0), **how)
        osl.pull(tmp_path / "all", own, **base)
        (own / "mine.py").write_text("mine")
        names = {file.name for file in own.iterdir() if file.suffix in (".py", ".md", ".json")}
        names -= {"orbax_safetensors_layout.json", "model.safetensors.index.json"}
        if from_base:
            assert names == {"config.json", "mine.py"}
        else:
            assert names == {*files, "mine.py"}
            assert "Step 7" in (own / "README.md").read_text()
    index = json.loads((own / "model.safetensors.index.json").read_text())
    assert "mine.py" not in index["metadata"]["pulled_files"]


@pytest.mark.parametrize("newer", [False, True])
def test_side_files_that_a_folder_lost_come_back(tmp_path, newer, caplog):
    model, own = tmp_path / "model", tmp_path / "own"
    (model / "additional_chat_templates").mkdir(parents=True)
    files = {"config.json": "{}", "additional_chat_templates/a.jinja": "a"}
    for name, text in files.items():
        (model / name).write_text(text)
    for values in ((0, 0, 0), (1, 0, 0), (1, 1, 0)):
        osl.publish(tmp_path / "all", abc(*values), options=osl.WriteOptions(model=model))
    osl.pull(tmp_path / "all", own, version=2)
    (own / "notes.md").write_text("mine")
    for name in files:
        (own / name).unlink()
    osl.pull(tmp_path / "all", own, version=3 if newer else 2)
    assert {name: (own / name).read_text() for name in files} == files
    assert (own / "notes.md").read_text() == "mine"
    assert as_bytes(osl.load(own)) == as_bytes(abc(1, int(newer), 0))
    assert "lacks additional_chat_templates/a.jinja, config.json" in caplog.text


def test_a_whole_version_of_another_program_is_known_by_its_values(tmp_path):
    trees = [{"w": jnp.arange(9.0) + n} for n in (0, 1)]
    for tree in trees:
        shutil.rmtree(tmp_path / "all", ignore_errors=True)
        osl.publish(tmp_path / "all", tree)
        index = tmp_path / "all/weight_v000001/model.safetensors.index.json"
        text = index.read_text().split('"history"')
        index.write_text(text[0].rstrip().rstrip(",") + text[1].partition('"')[2].partition('"')[2])
        osl.pull(tmp_path / "all", tmp_path / "own")
        assert read_version(tmp_path, 0, tmp_path / "own") == as_bytes(tree)


def test_a_copy_of_the_versions_is_the_same_history(tmp_path):
    tree = model()
    osl.publish(tmp_path / "all", tree)
    held = osl.pull(tmp_path / "all", tree)
    shutil.copytree(tmp_path / "all", tmp_path / "copy", copy_function=shutil.copyfile)
    assert osl.pull(tmp_path / "copy", held) is held


def narrow(values, dtype):
    return np.array(values).astype(dtype)


@pytest.mark.parametrize("on_device", [True, False])
def test_elements_narrower_than_a_byte(tmp_path, on_device, caplog):
    place = jnp.asarray if on_device else np.asarray
    kinds = {"i": ml_dtypes.int4, "u": ml_dtypes.uint4, "odd": ml_dtypes.float4_e2m1fn}
    values = [{"i": [-1, 2, -8], "u": [15, 1, 7], "odd": [1, -2, 4]}]
    values.append({"i": [-2, 2, 7], "u": [14, 1, 7], "odd": [1, -4, 0.5]})
    first, second = ({n: place(narrow(v, kinds[n])) for n, v in tree.items()} for tree in values)
    for tree in (first, second):
        osl.publish(tmp_path, tree)
    caplog.set_level("WARNING", logger="absl")
    for into in (None, first):
        held = osl.pull(tmp_path, into, version=1)
        for pulled in (osl.pull(tmp_path, into), osl.pull(tmp_path, held)):
            for name, expected in second.items():
                assert pulled.tree[name].dtype == expected.dtype
                np.testing.assert_array_equal(
                    np.asarray(pulled.tree[name]).astype(float), np.asarray(expected).astype(float)
                )
    osl.pull(tmp_path, tmp_path / "own", version=1)
    osl.pull(tmp_path, tmp_path / "own")
    for name, value in osl.load(tmp_path / "own").items():
        assert value.dtype == second[name].dtype
        np.testing.assert_array_equal(
            np.asarray(value).astype(float), np.asarray(second[name]).astype(float)
        )
    assert caplog.records == []


def test_a_base_of_one_file_says_what_its_bytes_are(tmp_path):
    trees = [{"w": jnp.asarray(values, jnp.int4)} for values in ([1, 2, 3], [3, 2, 1])]
    osl.save(tmp_path / "base", trees[0])
    base = tmp_path / "base" / "model.safetensors"
    assert osl.publish(tmp_path / "all", trees[1], base=base) == 1
    pulled = osl.pull(tmp_path / "all", trees[0], base=base)
    assert pulled.tree["w"].tolist() == [3, 2, 1]


def test_numpy_arrays_of_another_byte_order(tmp_path, caplog):
    trees = [{"w": (np.arange(9) * n).astype(">f4")} for n in (1, 2)]
    for tree in trees:
        osl.publish(tmp_path, tree)
    caplog.set_level("WARNING", logger="absl")
    pulled = osl.pull(tmp_path, osl.pull(tmp_path, trees[0], version=1))
    np.testing.assert_array_equal(pulled.tree["w"], trees[1]["w"])
    assert caplog.records == []


@pytest.mark.parametrize(
    ("first", "second", "expected", "found"),
    [
        (jnp.zeros(4, jnp.int4), jnp.zeros(4, jnp.int8), "int4", "int8"),
        (jnp.zeros(4, jnp.uint8), jnp.zeros(4, jnp.uint4), "uint8", "uint4"),
        (
            jax.random.key(1, impl="rbg"),
            jnp.zeros(4, jnp.uint32),
            "PRNG keys of rbg",
            "uint32",
        ),
    ],
)
def test_equal_bits_of_another_meaning_are_refused(tmp_path, first, second, expected, found):
    osl.publish(tmp_path, {"w": first, "a": jnp.zeros(3)})
    with pytest.raises(osl.MismatchError, match="of another type") as caught:
        osl.publish(tmp_path, {"w": second, "a": jnp.zeros(3)})
    assert (caught.value.tensor, caught.value.expected) == ("w", expected)
    assert caught.value.found == found
    assert "whole_every=1" in caught.value.hint
    assert osl.publish(tmp_path, {"w": second, "a": jnp.zeros(3)}, whole_every=1) == 2
    pulled = osl.pull(tmp_path).tree
    assert pulled["w"].dtype == second.dtype


@pytest.mark.parametrize("kind", ["numpy", "float64", "float4"])
def test_what_cannot_be_compared_is_refused_from_the_first_version_on(tmp_path, kind):
    mapping = osl.Mapping([osl.rule("a", osl.tensor("x").transpose())])
    trees = {
        "numpy": ({"a": np.ones((3, 4), np.float32)}, mapping),
        "float64": ({"a": np.ones((3, 4))}, mapping),
        "float4": ({"a": np.ones(4, ml_dtypes.float4_e2m1fn)}, None),
    }
    tree, mapping = trees[kind]
    with pytest.raises(osl.SafetensorsLayoutError, match="whole_every=1") as caught:
        osl.publish(tmp_path, tree, mapping=mapping)
    assert caught.value.tensor == "a"
    assert not list(tmp_path.iterdir())
    for number in (1, 2):
        assert osl.publish(tmp_path, tree, mapping=mapping, whole_every=1) == number


def test_python_values_are_refused(tmp_path):
    """A difference would not have them, and a pull would give those of the last whole version."""
    with pytest.raises(osl.MismatchError, match=r"'step'.*arrays alone"):
        osl.publish(tmp_path, {"w": jnp.ones(3), "step": 3})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["", "weight_v000001", "weight_v000002", "weight_v000002/new"])
def test_a_published_version_is_not_replaced(tmp_path, where):
    for n in (1, 2, 3):
        osl.publish(tmp_path / "all", {"w": jnp.ones(4) * n})
    with pytest.raises(osl.InvalidArgumentError, match="where versions are"):
        osl.pull(tmp_path / "all", tmp_path / "all" / where)
    (tmp_path / "link").symlink_to(tmp_path / "all")
    if where.endswith(("1", "2")):  # by the versions of another folder
        osl.publish(tmp_path / "others", {"w": jnp.zeros(4)})
        with pytest.raises(osl.CheckpointExistsError, match="was not pulled"):
            osl.pull(tmp_path / "others", tmp_path / "link" / where)
    for n in (1, 2, 3):
        assert osl.pull(tmp_path / "link", version=n).tree["w"][0] == n


def test_an_incomplete_version_is_an_error_that_says_what_to_do(tmp_path):
    osl.publish(tmp_path, model())
    torn = tmp_path / "weight_v000002"
    shutil.copytree(tmp_path / "weight_v000001", torn)
    (torn / "model.safetensors.index.json").unlink()
    with pytest.raises(osl.CheckpointExistsError, match=r"weight_v000002.*remove the folder") as at:
        osl.publish(tmp_path, model())
    assert "overwrite" not in str(at.value)
    shutil.rmtree(torn)
    assert osl.publish(tmp_path, model()) == 2


@pytest.mark.parametrize("damage", ["short", "away"])
def test_a_folder_whose_files_are_damaged_is_pulled_anew(tmp_path, damage, caplog):
    for step in (0, 1):
        osl.publish(tmp_path / "all", abc(step, 0, 0))
    osl.pull(tmp_path / "all", tmp_path / "own")
    file = tmp_path / "own/model.safetensors"
    data = file.read_bytes()
    file.unlink()
    if damage == "short":
        file.write_bytes(data[:-1])
    osl.pull(tmp_path / "all", tmp_path / "own")
    assert file.read_bytes() == data
    assert "is pulled anew" in caplog.text


def test_side_files_that_were_not_published_again_go(tmp_path):
    """Those in folders, too; what others put beside them stays, and they may come back."""
    model, own = tmp_path / "model", tmp_path / "own"
    template = "additional_chat_templates/a.jinja"
    for number, has_template in enumerate([True, True, False, False, True]):
        shutil.rmtree(model, ignore_errors=True)
        (model / "additional_chat_templates").mkdir(parents=True)
        (model / "config.json").write_text("{}")
        for name in ("chat_template.jinja", template) if has_template else ():
            (model / name).write_text(str(number))
        options = osl.WriteOptions(model=model)
        osl.publish(tmp_path / "all", abc(number, 0, 0), whole_every=2, options=options)
        osl.pull(tmp_path / "all", own)
        (own / "additional_chat_templates").mkdir(exist_ok=True)
        (own / "additional_chat_templates" / "mine.txt").write_text("mine")
        published = number < 3
        assert (own / "chat_template.jinja").exists() == (own / template).exists() == published
    osl.publish(tmp_path / "all", abc(9, 0, 0), whole_every=2, options=options)
    osl.pull(tmp_path / "all", own)
    assert (own / template).read_text() == "4"
    assert (own / "additional_chat_templates" / "mine.txt").read_text() == "mine"


def test_the_newest_version_is_found_without_looking_at_all(tmp_path):
    for number in range(12):
        osl.publish(tmp_path, abc(number, 0, 0))
    with recording() as storage:
        osl.pull(tmp_path, abc(0, 0, 0))
    seen = {name.split("/")[-2] for name, _, _ in storage.ranges}
    assert seen <= {"weight_v000010", "weight_v000011", "weight_v000012"}


def test_leaves_of_one_tensor_on_different_devices_are_refused_from_the_first_version_on(tmp_path):
    rules = [osl.rule(n, osl.tensor("w").slice(0, 8 * i, 8 * i + 8)) for i, n in enumerate("ab")]
    mapping = osl.Mapping(rules).like({"w": ((16,), np.dtype("f4"))})
    leaf = jnp.arange(8.0)
    tree = {name: jax.device_put(leaf, jax.devices()[n]) for n, name in enumerate("ab")}
    with pytest.raises(osl.MismatchError, match="on different devices") as caught:
        osl.publish(tmp_path, tree, mapping=mapping)
    assert caught.value.tensor == "b"
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        osl.publish(tmp_path, tree, mapping=mapping, whole_every=1)
