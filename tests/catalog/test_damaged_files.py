"""What stands in the place of a file, or of a path, is told alike wherever it stands."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy

import orbax_safetensors_layout as osl
from orbax_safetensors_layout.analysis import inspect

W = {"w": np.ones((2, 2), np.float32)}
LORA = {"base_model.model.x.lora_A.weight": np.ones((2, 2), np.float32)}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["x"]}


def take_card(folder):
    options = osl.WriteOptions(model=folder)
    osl.save(folder.parent / "saved", W, options=options)


READS = {  # of a file what reads it
    "model.safetensors": osl.load,
    "model.safetensors.index.json": osl.load,
    "orbax_safetensors_layout.json": osl.load,
    "orbax_safetensors_layout.digests.json": osl.verify,
    "config.json": osl.families.mapping,
    "hf_quant_config.json": osl.dequantized,
    "tokenizer.json": take_card,
    "adapter_model.safetensors": osl.peft.load,
    "adapter_config.json": lambda folder: osl.peft.merge(
        osl.Mapping([osl.rule("x.weight", osl.tensor("x.weight"))]), folder
    ),
}


def told(read, folder):
    """The text of the error of a read, or of the findings."""
    try:
        result = read(folder)
    except osl.SafetensorsLayoutError as error:
        return str(error)
    assert isinstance(result, osl.Report)
    assert not result.ok
    return str(result)


@pytest.fixture(params=READS)
def damaged(request, tmp_path):
    """A folder of which one file, the parameter, is not there yet; the file, and what reads it."""
    folder = tmp_path / "model"
    folder.mkdir()
    file = folder / request.param
    if file.name.startswith("adapter"):
        safetensors.numpy.save_file(LORA, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
        file.unlink()
    elif file.name.endswith("digests.json"):
        osl.save(folder, W, options=osl.WriteOptions(digests=True))
        file.unlink()
    elif file.name != "model.safetensors":
        safetensors.numpy.save_file(W, folder / "weights.safetensors")
    return file, READS[request.param]


def test_a_pointer_of_git_lfs(damaged):
    file, read = damaged
    file.write_bytes(POINTER)
    text = told(read, file.parent)
    assert "It is a Git LFS pointer; run `git lfs pull`." in text
    assert file.name in text


def test_a_link_that_leads_nowhere(damaged):
    """As in a snapshot of the hub's cache that was copied without its blobs."""
    file, read = damaged
    file.symlink_to("../../blobs/4d7a")
    text = told(read, file.parent)
    assert "the link leads nowhere" in text
    assert "../../blobs/4d7a" in text
    assert file.name in text


def test_a_configuration_whose_link_leads_nowhere_is_not_left_out(tmp_path):
    """Else codes would be taken for values."""
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.numpy.save_file(W, folder / "model.safetensors")
    (folder / "config.json").symlink_to("../../blobs/4d7a")
    for use in (osl.dequantized, lambda path: osl.convert(path, tmp_path / "to", format="hf")):
        with pytest.raises(osl.StorageError, match="the link leads nowhere"):
            use(folder)
    assert "the link leads nowhere" in inspect(folder).problem


def test_a_path_that_is_a_link_that_leads_nowhere(tmp_path):
    for name in ("model.safetensors", "snapshot"):
        (tmp_path / name).symlink_to(tmp_path / "gone")
        for read in (osl.load, osl.verify, osl.metadata, inspect):
            with pytest.raises(osl.StorageError, match=r"the link leads nowhere .*`cp -rL`"):
                read(tmp_path / name)


@pytest.mark.parametrize(
    ("begin", "hint"), [(b"PK\x03\x04\0\0\x08\x08", "torch.save"), (b"<!DOCTYPE html>", "web page")]
)
def test_other_files_of_the_name(tmp_path, begin, hint):
    (tmp_path / "model.safetensors").write_bytes(begin + bytes(20))
    with pytest.raises(osl.FormatError, match=hint):
        osl.load(tmp_path)


def test_the_name_of_a_repository_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uses = (
        osl.load,
        osl.metadata,
        osl.verify,
        osl.peft.load,
        osl.families.mapping,
        osl.dequantized,
        inspect,
        lambda path: osl.convert(path, tmp_path / "to"),
    )
    for use in uses:
        with pytest.raises(osl.CheckpointNotFoundError) as caught:
            use("org/model")
        assert "If a repository of the hub is meant, give 'hf://org/model'." in str(caught.value)
    (tmp_path / "org").mkdir()
    with pytest.raises(osl.CheckpointNotFoundError) as caught:
        osl.load("org/model")
    assert "hub" not in str(caught.value)


def test_adapters_of_mlx(tmp_path, caplog):
    adapter = {"layers.0.q_proj.lora_a": np.ones((4, 2), np.float32)}
    safetensors.numpy.save_file(adapter, tmp_path / "adapters.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"fine_tune_type": "lora"}')
    for use in (
        osl.peft.load,
        lambda path: osl.peft.merge(osl.Mapping([osl.rule("x", osl.tensor("x"))]), path),
    ):
        with pytest.raises(osl.FormatError, match="the adapter is one of MLX") as caught:
            use(tmp_path)
        assert "osl.load gives its tensors as they are" in str(caught.value)
    assert osl.load(tmp_path).keys() == adapter.keys()  # as the hint says
    safetensors.numpy.save_file(W, tmp_path / "weights.safetensors")
    assert osl.load(tmp_path).keys() == W.keys()
    assert "'adapters.safetensors' is left out" in caplog.text
