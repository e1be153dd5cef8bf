"""Core of eplb-service: layouts, heat, the solver, the planner and the wire format.

The service and the agents share this package, and an inference engine can run its planner in-process. The base needs
numpy only. The extra ``planner`` adds numba for the solver; the extra ``wire`` adds grpcio, protobuf and pydantic.
"""

__version__ = "0.1.0"
