"""Files of adapters: nothing stays open, other versions are refused, `hf://`, sub-folders."""

from __future__ import annotations

import gc
import json
import os
import pickle
import time

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import assert_same_bits
from http_server import Reply, Server, files_of
from remote_checks import descriptors, hub_in_use, shown, threads

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.lora import adapter_files
from orbax_safetensors_layout.mapping import fingerprint
from orbax_safetensors_layout.storage import LocalStorage
from orbax_safetensors_layout.storage.schemes import OPENERS

LAYERS = [f"model.layers.{i}.q_proj" for i in range(6)]
WEIGHTS = {
    f"{name}.weight": np.random.default_rng(i).standard_normal((64, 32)).astype(np.float32)
    for i, name in enumerate(LAYERS)
}


def factors(layers=LAYERS, seed=7):
    random = np.random.default_rng(seed)
    shapes = {"lora_A": (2, 32), "lora_B": (64, 2)}
    return {
        f"{name}.{part}.weight": random.standard_normal(shape).astype(np.float32)
        for name in layers
        for part, shape in shapes.items()
    }


def adapter(folder, lora, **config):
    """A folder as PEFT writes it."""
    os.makedirs(folder, exist_ok=True)
    full = {f"base_model.model.{name}": value for name, value in lora.items()}
    safetensors.numpy.save_file(full, f"{folder}/adapter_model.safetensors")
    with open(f"{folder}/adapter_config.json", "w") as file:
        json.dump({"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config}, file)
    return str(folder)


def assert_merged(loaded, lora):
    assert loaded.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        a, b = (lora[name.replace("weight", f"lora_{x}.weight")].astype(np.float64) for x in "AB")
        assert_same_bits(np.asarray(loaded[name]), weight + (b @ a * 1.5).astype(np.float32))


@pytest.fixture
def base(tmp_path):
    osl.save(tmp_path / "base", WEIGHTS)
    return str(tmp_path / "base")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_in_use(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.mark.parametrize("place", ["local", "hub"])
def test_a_merged_mapping_holds_nothing_open(tmp_path, base, place, request):
    lora = factors()
    path = adapter(tmp_path / "lora" / "it", lora)
    if place == "hub":  # which closes only when nobody is connected any more
        request.getfixturevalue("hub").add("org/lora", tmp_path / "lora")
        path = "hf://org/lora/it"
        osl.peft.config(path)  # the session of huggingface_hub stays
    osl.load(base)
    gc.collect()
    before = descriptors(), threads()
    mapping = osl.peft.merge(None, path, base=base)
    assert_comes_back(before)
    for _ in range(2):
        assert_merged(osl.load(base, mapping=mapping), lora)
        assert_comes_back(before)


def test_an_adapter_is_read_once_where_it_is_cached(tmp_path, base, hub):
    lora = factors()
    adapter(tmp_path / "lora", lora)
    hub.add("org/lora", tmp_path / "lora")
    options = osl.ReadOptions(cache=tmp_path / "cache", cache_bytes=1 << 30)

    def read_bytes():
        hub.hub.log.clear()
        hub.cdn.log.clear()
        mapping = osl.peft.merge(None, "hf://org/lora", base=base, options=options)
        assert_merged(osl.load(base, mapping=pickle.loads(pickle.dumps(mapping))), lora)
        assert osl.peft.config("hf://org/lora", options=options)["r"] == 2
        ranges = hub.hub.ranges() + hub.cdn.ranges()
        return sum(stop - start for name, start, stop in ranges)

    assert read_bytes() > 0
    assert read_bytes() == 0


def assert_comes_back(before):
    """As many descriptors and threads as before, once a server of this process has noticed."""
    deadline = time.monotonic() + 5
    while descriptors() > before[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert descriptors() <= before[0]
    assert threads() == before[1]


def test_a_load_opens_an_adapter_once(tmp_path, base, monkeypatch):
    opened = []
    own = adapter_files.open_storage
    monkeypatch.setattr(
        adapter_files, "open_storage", lambda path, **how: opened.append(path) or own(path, **how)
    )
    mapping = osl.peft.merge(None, adapter(tmp_path / "lora", factors()), base=base)
    opened.clear()
    for _ in range(2):
        assert_merged(osl.load(base, mapping=mapping), factors())
    assert len(opened) == 1


def test_an_adapter_of_any_size_takes_bounded_memory(tmp_path, base, monkeypatch):
    """Tensors beyond the bound are read again, and not kept."""
    monkeypatch.setattr(adapter_files, "_KEPT_BYTES", 2048)
    lora = factors()
    mapping = osl.peft.merge(None, adapter(tmp_path / "lora", lora), base=base)
    (overlay,) = {rule.expr.overlay for rule in mapping.rules}
    for _ in range(2):
        assert_merged(osl.load(base, mapping=mapping), lora)
        assert 0 < sum(value.nbytes for value in overlay._files._kept.values()) <= 2048


@pytest.mark.parametrize("how", ["values", "time", "removed", "hub"])
def test_another_version_than_the_one_that_was_merged_is_refused(tmp_path, base, how, request):
    path = adapter(tmp_path / "lora", factors())
    weights = f"{path}/adapter_model.safetensors"
    place = path
    if how == "hub":
        hub = request.getfixturevalue("hub")
        hub.add("org/lora", tmp_path / "lora")
        place = "hf://org/lora"
    mapping = osl.peft.merge(None, place, base=base)
    if how == "values":
        adapter(path, factors(seed=8))
    elif how == "time":
        os.utime(weights, (1, 1))
    elif how == "removed":
        os.remove(weights)
    else:
        adapter(tmp_path / "new", factors(seed=8))
        hub.add("org/lora", tmp_path / "new")
    with pytest.raises(osl.SafetensorsLayoutError) as error:
        osl.load(base, mapping=mapping)
    assert "adapter_model.safetensors" in str(error.value)
    assert "no such file" in str(error.value) or "Merge it again" in str(error.value)
    if how != "removed":
        assert_merged(
            osl.load(base, mapping=osl.peft.merge(None, place, base=base)),
            factors(seed=7 if how == "time" else 8),
        )


def test_versions_that_begin_with_the_same_are_told_apart(tmp_path, base):
    """Of adapters whose first matrices are frozen."""
    digests = []
    for seed in (7, 8):
        lora = {"model.a.lora_A.weight": np.zeros((2, 1 << 18), np.float32), **factors(seed=seed)}
        files = adapter_files.AdapterFiles(adapter(tmp_path / str(seed), lora), osl.ReadOptions())
        assert min(files.entries.values(), key=lambda entry: entry.start).nbytes > 1 << 20
        digests.append(files.digest)
    assert len({*digests}) == 2


def test_a_merged_mapping_is_pickled_with_the_version_that_it_merged(tmp_path, base, monkeypatch):
    lora = factors()
    adapter(tmp_path / "lora", lora)
    monkeypatch.chdir(tmp_path)
    mapping = osl.peft.merge(None, "lora", base=base)
    stored = pickle.dumps(mapping)
    os.makedirs("elsewhere")
    monkeypatch.chdir("elsewhere")
    again = pickle.loads(stored)
    assert fingerprint(again) == fingerprint(mapping)
    assert_merged(osl.load(base, mapping=again), lora)
    elsewhere = osl.peft.merge(None, adapter(tmp_path / "copy", lora), base=base)
    assert elsewhere.merged == mapping.merged
    adapter(tmp_path / "lora", factors(seed=8))
    assert fingerprint(osl.peft.merge(None, tmp_path / "lora", base=base)) != fingerprint(mapping)
    with pytest.raises(osl.StorageError, match="Merge it again"):
        pickle.loads(stored)


def test_a_signed_url_of_a_folder(tmp_path, base):
    """Each file is asked for with the query, which no error shows."""
    lora = factors()
    adapter(tmp_path / "lora", lora)
    adapter(tmp_path / "odd", lora, peft_type="IA3")
    adapter(tmp_path / "large", lora, r=3)
    files = files_of(tmp_path)

    def answer(request):
        is_known = request.query == {"sig": "hunter2"} and request.authorization
        return files(request) if is_known else Reply(403, {})

    with Server(answer) as server:
        url = server.url.replace("//", "//me:hunter2@") + "/files/{}?sig=hunter2"
        loaded = osl.peft.load(url.format("lora"))
        assert loaded.keys() == lora.keys()
        for name, value in lora.items():
            assert_same_bits(loaded[name], value)
        assert osl.peft.config(url.format("lora"))["r"] == 2
        mapping = osl.peft.merge(None, url.format("lora"), base=base)
        assert_merged(osl.load(base, mapping=mapping), lora)
        for name in ("odd", "large", "gone"):
            with pytest.raises(osl.SafetensorsLayoutError, match=f"/files/{name}") as caught:
                osl.load(base, mapping=osl.peft.merge(None, url.format(name), base=base))
            assert "hunter2" not in shown(caught.value)
            with pytest.raises(osl.SafetensorsLayoutError) as caught:
                osl.peft.load(url.format(name), {"x": np.ones(3)})
            assert "hunter2" not in shown(caught.value)


def test_storages_are_closed_where_the_weights_vanish(tmp_path, monkeypatch):
    path = adapter(tmp_path / "lora", factors())
    storages = []

    class Noted(LocalStorage):
        closed = False

        def __init__(self, *_):
            super().__init__()
            storages.append(self)
            if len(storages) == 2:
                os.unlink(f"{path}/adapter_model.safetensors")

        def close(self):
            self.closed = True
            super().close()

    monkeypatch.setitem(OPENERS, "", lambda path, retries: (Noted(), path))
    with pytest.raises(osl.CheckpointNotFoundError, match=r"adapter_model\.safetensors"):
        osl.peft.load(path)
    assert [storage.closed for storage in storages] == [True, True]


@pytest.mark.parametrize("place", ["local", "hub"])
def test_adapters_in_folders_of_one_are_taken_by_their_paths(tmp_path, base, place, request):
    """As PEFT saves those that have names of their own."""
    root = tmp_path / "adapters"
    all_of = {name: factors(seed=seed) for seed, name in enumerate(("one", "two"))}
    for name, lora in all_of.items():
        adapter(root / name, lora)
    path = str(root)
    if place == "hub":
        request.getfixturevalue("hub").add("org/lora", root)
        path = "hf://org/lora@main"
    for name, lora in all_of.items():
        loaded = osl.peft.load(f"{path}/{name}")
        assert loaded.keys() == lora.keys()
        for tensor, value in lora.items():
            assert_same_bits(loaded[tensor], value)
        assert osl.peft.config(f"{path}/{name}")["r"] == 2
        mapping = osl.peft.merge(None, f"{path}/{name}", base=base)
        assert_merged(osl.load(base, mapping=mapping), lora)
    for call in (osl.peft.load, osl.peft.config, lambda p: osl.peft.merge(None, p, base=base)):
        with pytest.raises(osl.CheckpointNotFoundError, match="'one', 'two'") as error:
            call(path)
        assert f"{path}/one" in str(error.value)


@pytest.mark.parametrize("digests", [False, True])
def test_an_adapter_is_saved_beside_its_model(tmp_path, digests):
    """And again: what is replaced is the adapter."""
    folder = tmp_path / "x"
    osl.save(folder, WEIGHTS, options=osl.WriteOptions(max_file_bytes=20_000, digests=digests))
    (folder / "ema.safetensors").write_bytes(b"theirs")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(before) > 4
    config = {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
    osl.peft.save(folder, factors(), config=config)
    with pytest.raises(osl.CheckpointExistsError):
        osl.peft.save(folder, factors(), config=config)
    osl.peft.save(folder, factors(seed=8), config=config, overwrite=True)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {"adapter_model.safetensors", "adapter_config.json"}
    loaded = osl.load(folder, mapping=osl.peft.merge(None, folder, base=folder))
    assert_merged(loaded, factors(seed=8))
    osl.verify(folder)
