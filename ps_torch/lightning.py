"""Lightning on parameter servers: a strategy for Trainer, whose name is "ps", one for groups of processes, and one for
Fabric. Needs `lightning`."""

from ps_worker.lightning import (
    FabricParameterServerStrategy,
    ParameterServerGroupStrategy,
    ParameterServerStrategy,
)

__all__ = ["FabricParameterServerStrategy", "ParameterServerGroupStrategy", "ParameterServerStrategy"]
