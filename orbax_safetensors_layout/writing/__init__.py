"""Executes write plans: host copies of shards into the parts of files, and their commit."""

from .assemble_files import gather, row_blocks
from .commit import appearance_rank, check_documents, check_is_folder, publication_of, publish
from .completion import Completion
from .folder import CheckpointFolder, companions, given_companions
from .host import HostValues
from .prepare_tree import PreparedTree
from .scatter import scatter
from .write import WriteStats, write_parts
