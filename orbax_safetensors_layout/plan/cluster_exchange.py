"""The shares of all processes of a cluster in what they read once and exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orbax_safetensors_layout.geometry import Ints, row_major_strides
from orbax_safetensors_layout.options import StorageProfile
from orbax_safetensors_layout.sharding import MeshShape, Partition, Replicas, Spec

from .exchange_rounds import ExchangeLimits, ExchangeRates, SharedLeaf, Stage, plan_exchange
from .shared_leaves import SharedLeaves


