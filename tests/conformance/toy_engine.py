"""A small MoE language model in numpy with an EPLB, and faults that the kit must detect.

``TOY_FAULTS`` names the faults of engines that the command line starts.
"""

import os

import numpy as np

from eplb_lab.conformance.engine import Answer, EngineError, Setup

LAYERS = 2
EXPERTS = 6
SLOTS = 8
HIDDEN = 16
VOCABULARY = 64
RANKS = 2
INTERVAL = 4


class ToyEngine:
    """Toy engine that serves from weights copied from slot to slot, as real engines do.

    Parameters
    ----------
    setup
        Options of the scenario.
    faults
        Names of the faults that the engine has.
    """

    def __init__(self, setup=None, faults=()):
        setup = setup or Setup()
        if setup.sleeps and "no-sleep-mode" in faults:
            raise EngineError("this engine has no sleep mode")
        draw = np.random.default_rng(0)
        self.faults = set(faults) | {setup.control}
        self.embedding_VH = draw.normal(size=(VOCABULARY, HIDDEN))
        self.router_LHE = draw.normal(size=(LAYERS, HIDDEN, EXPERTS))
        # int8 weights and one scale per expert. If the engine is not quantised, all scales are 1.
        self.checkpoint = [
            draw.integers(-127, 128, size=(LAYERS, EXPERTS, HIDDEN, HIDDEN)).astype(np.int8),
            draw.uniform(0.5, 2.0, size=(LAYERS, EXPERTS)) if setup.quantised else np.ones((LAYERS, EXPERTS)),
        ]
        self.initial_LP = np.tile(np.arange(SLOTS) % EXPERTS, (LAYERS, 1))
        self.placement_LP = self.initial_LP.copy()
        self.reload(at=self.placement_LP)
        self.table_LP = self.placement_LP.copy()
        self.next_table = None
        self.orders = []
        self.done = 0
        self.steps = 0
        self.runs = 0
        self.closed = False

    def placement(self):
        return self.placement_LP.copy()

    def order(self, placement):
        assert (np.sort(np.unique(placement)) == np.arange(EXPERTS)).all()
        self.orders.append(placement)

    def adopted(self):
        return self.done

    def settle(self):
        if self.orders and "adopts-nothing" in self.faults:
            raise EngineError("the engine adopts nothing")
        while self.orders:
            self.generate([[1]], INTERVAL)
        # Real engines confirm a placement at their next rearrangement.
        self.generate([[1]], INTERVAL - 1)

    def generate(self, prompts, tokens):
        assert not self.closed
        self.runs += 1
        states = [self._read(prompt, n) for n, prompt in enumerate(prompts)]
        answers = [([], []) for _ in prompts]
        for step in range(tokens):
            for n, state in enumerate(states):
                scores = self.embedding_VH @ self._forward(state, n + step)
                if "unstable" in self.faults:
                    scores = scores + self.runs * np.arange(VOCABULARY)
                token = int(scores.argmax())
                answers[n][0].append(token)
                answers[n][1].append(float(scores[token] - np.logaddexp.reduce(scores)))
                states[n] = 0.6 * state + self.embedding_VH[token]
            self._after_step()
        return [Answer(tuple(ids), tuple(logprobs)) for ids, logprobs in answers]

    def sleep_and_wake(self):
        if "forgets-tables" in self.faults:
            self.table_LP = self.initial_LP.copy()

    def reload(self, at=None):
        moved = (self.placement_LP != self.initial_LP).any()
        if "cannot-reload" in self.faults and moved:
            raise EngineError("the shapes do not match")
        at = self.initial_LP if at is None and "reloads-initial-slots" in self.faults else self.placement_LP
        self.weights = [
            np.stack([tensor[layer][row] for layer, row in enumerate(at)]) for tensor in self.checkpoint
        ]

    def close(self):
        self.closed = True

    def _read(self, prompt, n):
        state = np.zeros(HIDDEN)
        for token in prompt:
            state = 0.6 * state + self.embedding_VH[token]
        return state

    def _forward(self, state, number):
        weights_LPHH, scale_LP = self.weights
        for layer in range(LAYERS):
            state = state / np.sqrt((state**2).mean())
            scores = state @ self.router_LHE[layer]
            for expert in np.argsort(-scores)[:2]:
                replicas = np.flatnonzero(self.table_LP[layer] == expert)
                slot = replicas[number % len(replicas)]
                share = 1 / (1 + np.exp(-scores[expert]))
                weight = weights_LPHH[layer, slot] * (scale_LP[layer, slot] / 127)
                state = state + share * np.tanh(weight @ state)
        return state

    def _after_step(self):
        self.steps += 1
        if self.next_table is not None:
            self.table_LP, self.next_table = self.next_table, None
        if self.orders and self.steps % INTERVAL == 0 and "adopts-nothing" not in self.faults:
            self._move(self.orders.pop(0))

    def _move(self, new_LP):
        old_LP = self.placement_LP
        old_table = self.table_LP.copy()
        weights = [tensor.copy() for tensor in self.weights]
        for layer, slot in zip(*np.nonzero(new_LP != old_LP), strict=True):
            expert = new_LP[layer, slot]
            source = int(np.flatnonzero(old_LP[layer] == expert)[0])
            within = source // (SLOTS // RANKS) == slot // (SLOTS // RANKS)
            if "drops-moves-within-a-rank" in self.faults and within:
                continue
            earlier = np.count_nonzero(new_LP[layer, :slot] == expert)
            if "fills-two-replicas" in self.faults and earlier >= 2:
                continue
            for tensor, old in zip(weights, self.weights, strict=True):
                if not ("leaves-scales" in self.faults and tensor.ndim == 2):
                    tensor[layer, slot] = old[layer, source]
        if (new_LP[0, 0] != old_LP[0, 0]) and self.faults & {"weight", "last-weight"}:
            tensor = 0 if "weight" in self.faults else -1
            weights[tensor][0, 0] = self.weights[tensor][0, 0]
        self.weights = weights
        self.placement_LP = new_LP.copy()
        self.table_LP = new_LP.copy()
        if "table" in self.faults:
            self.table_LP[0] = old_table[0]
        if "switches-tables-late" in self.faults:
            self.table_LP, self.next_table = old_table, self.table_LP
        self.done += 1


def start(setup):
    """Start an engine for ``python -m eplb_lab.conformance tests.conformance.toy_engine:start``."""
    return ToyEngine(setup, filter(None, os.environ.get("TOY_FAULTS", "").split(",")))
