"""Commands that ``eplb`` finds through entry points: ``eplb demo`` and ``eplb bench``."""
