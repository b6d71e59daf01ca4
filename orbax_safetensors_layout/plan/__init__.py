"""Pure plans of reads and writes: printed and costed without touching a file or a device."""

from .array_source import (
    ArraySource,
    ComposedBlock,
    MappedSource,
    StoredSource,
    array_sources,
    leaf_sources,
)
from .chunks import ChunkedArray, plan_chunks
from .cluster import (
    ClusterPlan,
    ClusterTensor,
    PlannedShares,
    plan_cluster,
    plan_cluster_writes,
)
from .coalesce import SMALL_REGION_BYTES, Request, RequestGroup
from .cost import Cost, HostRate, LeafCost
from .coverage import Coverage, coverage
from .exchange_plan import ExchangeLimits, ExchangePolicy, LeafKind, plan_exchange
from .exchange_rounds import Fragment, Item, Round, RoundForm, SharedLeaf, Stage
from .leaf_reads import ComposedArray, LeafRead
from .reads import ReadPlan, exchange_cost, plan_reads, read_bytes
from .region_reads import ArrayRegion, RegionReads
from .regions import ByteRegion, GatherAxis, RegionPlan, TileKey
from .shared_leaves import SharedLeaves
from .stored_tensors import StoredTensors
from .writes import (
    PIECES_FOLDER,
    FilePart,
    FileWrite,
    LeafWrite,
    MappedTensors,
    WritePlan,
    plan_all_writes,
    plan_consolidation,
    plan_mapped_writes,
    plan_writes,
    tensors_to_write,
)
