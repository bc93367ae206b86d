"""The Protocols of the plug points, and the values that cross them.

This package is the contract that plugins are written against (`octavo.catalog.CONTRACT` is its
version). It holds no behaviour. torch appears in annotations only, so that the scheduler, the
allocator and the server process can import it without torch.

Vocabulary. A *row* or *slot* is a line of the state table: a running sequence keeps its slot from
admission to release, and allocator, block tables and runner all index by it. A *group* is a set
of layers whose KV cache has one shape and one block table. A *block* (page) is one pool index,
the same in every layer of its group.
"""

from __future__ import annotations

from octavo.interfaces.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionParts,
    BoundGroup,
    FusedPrologue,
    PlannedWorkspace,
    SparseBackend,
    SpreadingPrologue,
    StepVariants,
)
from octavo.interfaces.execution import Executor, Handle, Runner
from octavo.interfaces.geometry import CacheLayout, KVGroup, KVSpec, Limits
from octavo.interfaces.grammar import Constraint, GrammarCompiler, GrammarParts
from octavo.interfaces.models import (
    Attention,
    CanonicalNames,
    Model,
    ModelAdapter,
    ModelFacts,
    ModelParts,
    OperatorParts,
    Operators,
)
from octavo.interfaces.scheduling import Allocator, AllocatorParts, Scheduler, SchedulerParts, Usage
from octavo.interfaces.step import SharedPrefix, Step, StepHost
from octavo.interfaces.tools import CallPiece, Said, Tool, ToolFormat, ToolParser
from octavo.interfaces.weights import (
    Activation,
    Experts,
    ExpertsSpec,
    Gate,
    GatedLinear,
    Linear,
    Quantize,
    Quantized,
    Quantizer,
    QuantizerParts,
    QuantizeTask,
    Routing,
    Weights,
)

__all__ = [
    "Activation",
    "Allocator",
    "AllocatorParts",
    "Attention",
    "AttentionBackend",
    "AttentionLayer",
    "AttentionParts",
    "BoundGroup",
    "CacheLayout",
    "CallPiece",
    "CanonicalNames",
    "Constraint",
    "Executor",
    "Experts",
    "ExpertsSpec",
    "FusedPrologue",
    "Gate",
    "GatedLinear",
    "GrammarCompiler",
    "GrammarParts",
    "Handle",
    "KVGroup",
    "KVSpec",
    "Limits",
    "Linear",
    "Model",
    "ModelAdapter",
    "ModelFacts",
    "ModelParts",
    "OperatorParts",
    "Operators",
    "PlannedWorkspace",
    "Quantize",
    "QuantizeTask",
    "Quantized",
    "Quantizer",
    "QuantizerParts",
    "Routing",
    "Runner",
    "Said",
    "Scheduler",
    "SchedulerParts",
    "SharedPrefix",
    "SparseBackend",
    "SpreadingPrologue",
    "Step",
    "StepHost",
    "StepVariants",
    "Tool",
    "ToolFormat",
    "ToolParser",
    "Usage",
    "Weights",
]
