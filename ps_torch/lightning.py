"""Lightning on parameter servers: a strategy for Trainer, whose name is "ps", and one for Fabric. Needs `lightning`."""

from ps_worker.lightning import FabricParameterServerStrategy, ParameterServerStrategy

__all__ = ["FabricParameterServerStrategy", "ParameterServerStrategy"]
