"""Facts of a deployment whose heat is recorded."""

from eplb_service.io.trace import TraceFacts

RANKS, SLOTS, LAYERS, EXPERTS = 4, 3, 2, 8
FACTS = TraceFacts(model="toy", ranks=RANKS, slots=SLOTS)
