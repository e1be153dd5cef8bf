"""Commands that ``eplb`` loads through entry points: ``eplb demo`` and ``eplb bench``."""
