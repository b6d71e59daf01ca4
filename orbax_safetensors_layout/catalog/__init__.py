"""Which tensors a checkpoint holds, and where: files, headers, index and pieces as one catalog."""

from .catalog import Catalog
from .checkpoint_ref import CheckpointRef
from .discover import Discovery, discover, is_safetensors_checkpoint, read_manifest
from .headers import read_header
from .nearby import USUAL_ITEMS
from .patterns import compile_pattern
from .piece_catalog import check_save
from .quantization import Quantization, find_quantization
from .select import select_names
from .suggestions import suggest_names
