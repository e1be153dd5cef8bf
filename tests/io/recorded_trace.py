"""Facts about the deployment that the recording tests use."""

from eplb_service.io.trace import TraceFacts

RANKS = 4
SLOTS = 3
LAYERS = 2
EXPERTS = 8
FACTS = TraceFacts(model="toy", ranks=RANKS, slots=SLOTS)
