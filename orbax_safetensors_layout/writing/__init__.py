"""Executes write plans: host copies of shards into the parts of files, and their commit."""

from .assemble_files import assemble_files, write_mapped
from .commit import appearance_rank, check_target, commit_when_complete
from .folder import CheckpointFolder, with_digests, write_small_files
from .host import HostValues
from .parts import stored_bytes
from .prepare_tree import PreparedTree
from .side_files import (
    SavedTensor,
    card_file,
    configured_files,
    described_files,
    model_files,
    read_sidecar_files,
    with_model_files,
)
from .write import write_parts
